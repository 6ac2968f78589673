"""lm-evaluation-harness on our model: a task made of local files gives the score of our own protocol, and each of its
three kinds of question has the answer that the model's plain passes give."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from paceline.core.errors import ConfigError, UserError
from paceline.evaluate.config import SamplingConfig, SuiteConfig
from paceline.evaluate.generate import generate
from paceline.evaluate.harness import judge_tasks, open_tasks
from paceline.evaluate.hellaswag import judge_hellaswag, read_hellaswag
from paceline.evaluate.load import LoadedRun, load_run
from paceline.evaluate.score import pair_row, score_rows, silent
from paceline.model.gpt import GPT
from paceline.text.tokenizer import Tokenizer
from train.tiny import SENTENCES

pytest.importorskip("lm_eval")

SAMPLED = [sentence.decode().strip() for sentence in SENTENCES]
TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {{validation: {file}}}
  cache_dir: {cache}
validation_split: validation
num_fewshot: 0
{rest}
"""
CHOICE = """
output_type: multiple_choice
doc_to_text: "{{query}}"
doc_to_target: "{{label}}"
doc_to_choice: endings
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
ROLLING = """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{query}}"
metric_list: [{metric: byte_perplexity}, {metric: bits_per_byte}]
"""
WRITING = """
output_type: generate_until
doc_to_text: "{{query}}"
doc_to_target: " "
generation_kwargs: {until: ["\\n"], max_gen_toks: 4}
metric_list: [{metric: exact_match}]
"""


def questions() -> list[dict]:
    """Scenes whose endings are all likely enough that a model hardly trained gets some right and some wrong."""
    endings = ["sat on the mat.", "ate the bone, and then it ate another.", "sing.", "in the morning the birds"]
    scenes = [f"{first} {second}" for first in SAMPLED for second in SAMPLED]
    return [
        {"activity_label": "Pets", "ctx_a": scene, "ctx_b": "the cat", "endings": endings, "label": number % 4}
        for number, scene in enumerate(scenes)
    ]


@pytest.fixture(scope="module")
def task_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three tasks on one file of nine questions, and the same questions as HellaSwag publishes them."""
    folder = tmp_path_factory.mktemp("tasks")
    rows = [{**row, "query": f"Pets: {row['ctx_a']} The cat"} for row in questions()]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, rest in (("pets", CHOICE), ("pets_text", ROLLING), ("pets_write", WRITING)):
        text = TASK.format(name=name, file=folder / "rows.jsonl", cache=folder / "cache", rest=rest)
        (folder / f"{name}.yaml").write_text(text)
    return folder


@pytest.fixture(scope="module")
def loaded(trained: Path) -> LoadedRun:
    return load_run(str(trained), device="cpu")


def test_a_task_of_local_files_has_the_score_of_our_own_protocol(task_folder: Path, loaded: LoadedRun) -> None:
    names = ["pets", "pets_text", "pets_write"]
    manager = open_tasks(names, task_folder)
    config = SuiteConfig(tasks=tuple(names))
    results = {result.name: result for result in judge_tasks(loaded, manager, config, most_tokens=256)}
    asked = read_hellaswag(task_folder / "rows.jsonl")
    ours = judge_hellaswag(
        loaded.model, loaded.tokenizer, asked, windows=loaded.windows, most_tokens=256, progress=silent
    )
    assert results["pets"].figures == pytest.approx(ours)
    assert 0 < ours["acc"] < 1
    assert results["pets"].of["examples"] == 9
    texts = [question.context for question in asked]
    rows = [pair_row(loaded.tokenizer, "", text) for text in texts]
    nats = sum(score.nats for score in score_rows(loaded.model, rows, windows=loaded.windows))
    bits = nats / torch.tensor(2.0).log().item() / sum(len(text.encode()) for text in texts)
    assert results["pets_text"].figures["bits_per_byte"] == pytest.approx(bits, rel=1e-5)
    assert results["pets_write"].figures["exact_match"] == 0.0


def ask(*arguments: object) -> SimpleNamespace:
    return SimpleNamespace(args=arguments)


def other_tokens(run: LoadedRun, tokenizer: Tokenizer) -> LoadedRun:
    """The same architecture, not trained, over another vocabulary."""
    config = replace(run.config.model, vocab_size=tokenizer.vocab_size)
    return replace(run, model=GPT(config, end_of_text=tokenizer.end_of_text), tokenizer=tokenizer)


def test_a_continuation_is_cut_from_its_context_as_ours_are(loaded: LoadedRun, tokenizer: Tokenizer) -> None:
    from paceline.evaluate.harness_model import HarnessModel

    run = other_tokens(loaded, tokenizer)
    with torch.no_grad():
        run.model.head.normal_(generator=torch.Generator().manual_seed(0))
    pairs = [("The cat", " sat"), ("The cat ", "sat"), ("The ca", "tapult"), ("", "The cat")]
    found = HarnessModel(run, most_tokens=256).loglikelihood([ask(*pair) for pair in pairs], disable_tqdm=True)
    rows = [pair_row(tokenizer, *pair) for pair in pairs]
    expected = [-score.nats for score in score_rows(run.model, rows, windows=run.windows)]
    assert [value for value, _ in found] == pytest.approx(expected)


def test_a_text_longer_than_a_sequence_is_counted_once_with_one_token_of_context(loaded: LoadedRun) -> None:
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    from paceline.evaluate.harness_model import HarnessModel

    text = " ".join(SAMPLED * 3)
    model = HarnessModel(loaded, most_tokens=50)
    [found] = model.loglikelihood_rolling([ask(text)])
    windows = get_rolling_token_windows(
        token_list=model.tok_encode(text), prefix_token=model.eot_token_id, max_seq_len=50, context_len=1
    )
    requests = [(("", ""), *make_disjoint_window(window)) for window in windows]
    assert found == pytest.approx(sum(value for value, _ in model._loglikelihood_tokens(requests)), rel=1e-6)


def test_writing_is_greedy_and_ends_before_a_stop_word(loaded: LoadedRun) -> None:
    from paceline.evaluate.harness_model import HarnessModel

    model = HarnessModel(loaded, most_tokens=256)
    [whole] = model.generate_until([ask("the cat", {"until": [], "max_gen_toks": 20})])
    greedy = generate(
        loaded.model,
        loaded.tokenizer.encode("the cat"),
        SamplingConfig(temperature=0.0),
        windows=loaded.windows,
        new_tokens=20,
    )
    assert whole == loaded.tokenizer.decode(greedy)
    stop = whole[5:7]
    [cut] = model.generate_until([ask("the cat", {"until": stop, "max_gen_toks": 20})])
    assert cut == whole[: whole.index(stop)]


def test_a_prompt_that_leaves_no_room_loses_its_beginning(loaded: LoadedRun) -> None:
    from paceline.evaluate.harness_model import HarnessModel

    model = HarnessModel(loaded, most_tokens=30)
    options = {"until": [], "max_gen_toks": 10}
    long, short = model.generate_until(
        [ask("x" * 500 + "the cat sat on the m", options), ask("the cat sat on the m", options)]
    )
    assert long == short


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("petz", "--tasks petz: no such task; did you mean pets?"),
        ("hellaswag", "no such task in .*; there are pets, pets_text, pets_write"),
    ],
)
def test_a_task_that_does_not_exist_is_one_line(name: str, complaint: str, task_folder: Path) -> None:
    with pytest.raises(ConfigError, match=complaint):
        open_tasks([name], task_folder)


def test_a_task_whose_data_are_gone_is_one_line(tmp_path: Path) -> None:
    text = TASK.format(name="gone", file=tmp_path / "gone.jsonl", cache=tmp_path / "cache", rest=CHOICE)
    (tmp_path / "gone.yaml").write_text(text)
    with pytest.raises(ConfigError, match="--tasks gone: could not be loaded") as caught:
        open_tasks(["gone"], tmp_path)
    assert "\n" not in str(caught.value)


def test_a_task_that_runs_what_the_model_writes_is_refused(task_folder: Path, tmp_path: Path) -> None:
    rest = CHOICE + "unsafe_code: true\n"
    text = TASK.format(name="daring", file=task_folder / "rows.jsonl", cache=tmp_path / "cache", rest=rest)
    (tmp_path / "daring.yaml").write_text(text)
    with pytest.raises(ConfigError, match="--tasks daring: runs code that the model writes"):
        open_tasks(["daring"], tmp_path)


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    with pytest.raises(UserError, match=r"pip install 'paceline\[eval\]'"):
        open_tasks(["arc_easy"], None)
