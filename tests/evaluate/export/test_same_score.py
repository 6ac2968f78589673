"""One score by two ways: a task of local files gives through `paceline evaluate` what it gives through the exported
model in lm-evaluation-harness's own `hf` class, by default, whatever the batch, and also past the model's length."""

import contextlib
import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.cli import main
from paceline.evaluate.load import load_run
from paceline.settings.data import DataConfig
from paceline.text.shard_writer import write_shard
from paceline.text.tokenizer import train_tokenizer
from train.tiny import SENTENCES, run, tiny_config

lm_eval = pytest.importorskip("lm_eval")
pytest.importorskip("accelerate")  # what lm_eval's `hf` asks for beyond transformers
pytestmark = pytest.mark.journey

TEXTS = [sentence.decode() for sentence in SENTENCES]
LENGTH = 256
"""Tokens of a sequence of the run."""
TASK = """
task: {name}
output_type: {kind}
dataset_path: json
dataset_kwargs:
  data_files: {{validation: {folder}/rows.jsonl}}
  cache_dir: {folder}/cache
validation_split: validation
num_fewshot: 0
doc_to_text: "{{{{{text}}}}}"
doc_to_target: "{{{{{target}}}}}"
{rest}
"""
KINDS = {
    "choice": ("multiple_choice", "scene", "label", "doc_to_choice: endings\nmetric_list: [{metric: acc}]"),
    "last_words": ("loglikelihood", "scene", "words", "metric_list: [{metric: acc}, {metric: perplexity}]"),
    "whole": ("loglikelihood_rolling", "", "scene", "metric_list: [{metric: bits_per_byte}]"),
    "writing": (
        "generate_until",
        "scene",
        "words",
        'generation_kwargs: {until: ["."], max_gen_toks: 12}\nmetric_list: [{metric: exact_match}]',
    ),
}


def scenes() -> list[str]:
    """Short ones, one that ends with a space, one that is cut in a word, and some longer than a sequence."""
    short = ["the cat", "a dog ate ", "birds si", *TEXTS, *(f"{first}and {first}" for first in TEXTS)]
    return [*short, " and ".join(TEXTS * 30), " or ".join(TEXTS * 45)]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    endings = ["sat on the mat.", "ate another bone, and then it ate", " sing.", "in the morning the birds"]
    rows = [
        {"scene": scene, "endings": endings, "label": number % 4, "words": " " + endings[number % 4].strip()}
        for number, scene in enumerate(scenes())
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, (kind, text, target, rest) in KINDS.items():
        task = TASK.format(name=name, kind=kind, folder=folder, text=text or "''", target=target, rest=rest)
        (folder / f"{name}.yaml").write_text(task)
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose tokens span letters and words, so that borders of tokens matter."""
    folder = tmp_path_factory.mktemp("run")
    config = tiny_config(folder / "bytes")
    tokenizer = train_tokenizer("bpe-300", TEXTS)
    (data := folder / "data").mkdir()
    tokenizer.save(data)
    draw = np.random.Generator(np.random.PCG64(0))
    for name, documents in (("x_train_000001.bin", 150), ("x_val_000000.bin", 12)):
        texts = ["".join(draw.choice(TEXTS, size=draw.integers(2, 40))) for _ in range(documents)]
        tokens = np.array([id for text in texts for id in (tokenizer.end_of_text, *tokenizer.encode(text))])
        write_shard(data / name, tokens.astype(np.uint16), documents=documents, tokenizer=tokenizer.fingerprint)
    named = DataConfig(dir=str(data), tokenizer="bpe-300", end_of_text=tokenizer.end_of_text, order="shuffled")
    model = replace(config.model, vocab_size=tokenizer.vocab_size)
    run(replace(config, data=named, model=model), folder / "run")
    return folder / "run"


@pytest.fixture(scope="module")
def exported(trained: Path) -> Path:
    folder = trained.with_name("hf")
    assert main(["export", str(trained), "--to", "hf", "--out", str(folder)]) == 0
    return folder


def judged(model: Any, tasks: Path, **more: object) -> dict[str, Any]:
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=tasks, include_defaults=False)
    found: dict[str, Any] = lm_eval.simple_evaluate(
        model=model, tasks=list(KINDS), task_manager=manager, bootstrap_iters=0, log_samples=True, **more
    )
    return found


def answers(found: dict[str, Any], name: str) -> list[Any]:
    """Of every question: log probabilities of its continuations, or the text that was written."""
    samples = sorted(found["samples"][name], key=lambda sample: sample["doc_id"])
    return [sample["filtered_resps"] for sample in samples]


@pytest.fixture(scope="module")
def ours(trained: Path, tasks: Path) -> dict[str, Any]:
    from paceline.evaluate.harness_model import HarnessModel

    return judged(HarnessModel(load_run(str(trained), device="cpu"), most_tokens=LENGTH), tasks)


@pytest.fixture(scope="module", params=[1, 8])
def theirs(request: pytest.FixtureRequest, exported: Path, tasks: Path) -> dict[str, Any]:
    """As `lm_eval --model hf --model_args pretrained=…,trust_remote_code=True --device cpu` does it: nothing else is
    said, neither how texts open nor how long they may be."""
    arguments = f"pretrained={exported},trust_remote_code=True"
    return judged("hf", tasks, model_args=arguments, device="cpu", batch_size=request.param)


@pytest.fixture(scope="module")
def told(trained: Path, tasks: Path) -> dict[str, dict[str, float]]:
    """The figures of every task, as the command leaves them on the card."""
    words = ["evaluate", str(trained), "--no-validation", "--tasks", *KINDS, "--tasks-dir", str(tasks), "--json"]
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(words) == 0
    return {entry["name"]: entry["figures"] for entry in json.loads(out.getvalue())}


def test_every_answer_is_the_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    for name in ("choice", "last_words"):
        for mine, other in zip(answers(ours, name), answers(theirs, name), strict=True):
            assert [greedy for _, greedy in pairs(mine)] == [greedy for _, greedy in pairs(other)]
            assert [nats for nats, _ in pairs(mine)] == pytest.approx([nats for nats, _ in pairs(other)], rel=1e-5)
    assert flat(answers(ours, "whole")) == pytest.approx(flat(answers(theirs, "whole")), rel=1e-5)
    assert answers(ours, "writing") == answers(theirs, "writing")
    assert len({text for [text] in answers(ours, "writing")}) > 1


def pairs(found: Sequence[Any]) -> list[tuple[float, bool]]:
    return [(float(nats), bool(greedy)) for nats, greedy in found]


def flat(found: Sequence[Any]) -> list[float]:
    return [float(value) for [value] in found]


def test_the_command_gives_the_score_of_the_exported_model(told: dict[str, Any], theirs: dict[str, Any]) -> None:
    for name, figure in (("choice", "acc"), ("last_words", "acc"), ("writing", "exact_match")):
        assert told[name][figure] == theirs["results"][name][f"{figure},none"]
    for name, figure in (("last_words", "perplexity"), ("whole", "bits_per_byte")):
        assert told[name][figure] == pytest.approx(theirs["results"][name][f"{figure},none"], rel=1e-5)
    assert 0 < told["choice"]["acc"] < 1
