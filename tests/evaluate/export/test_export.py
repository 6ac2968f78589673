"""`paceline export` from a run on the disk to a model that transformers loads and that writes the same text."""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from paceline.checkpoint.run_folder import RunFolder
from paceline.cli import main
from paceline.core.errors import PacelineError, RunError
from paceline.core.schema import from_dict
from paceline.evaluate.config import SamplingConfig
from paceline.evaluate.export import export as exporting
from paceline.evaluate.export.export import MODEL_FILES, export
from paceline.evaluate.generate import sample_text
from paceline.evaluate.load import load_run, read_saved
from paceline.metrics.card import read_card, write_card
from paceline.model.gpt import GPT
from paceline.settings.model import ModelConfig
from train.tiny import run, tiny_config

HF_FILES = {"README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} | {
    "tokenizer_config.json",
    *MODEL_FILES,
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of bytes, with checkpoints after 9 and 12 steps."""
    folder = tmp_path_factory.mktemp("export")
    run(tiny_config(folder / "data"), folder / "run")
    return folder / "run"


@pytest.fixture(scope="module")
def hf(trained: Path) -> Path:
    folder = trained.with_name("hf")
    assert main(["export", str(trained), "--to", "hf", "--out", str(folder)]) == 0
    return folder


def refusal(capsys: pytest.CaptureFixture[str], *words: object, code: int = 2) -> str:
    """The one line with which the command refuses."""
    assert main(["export", *map(str, words)]) == code
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


def test_transformers_loads_it_and_writes_the_same_text(trained: Path, hf: Path) -> None:
    assert {path.name for path in hf.iterdir()} == HF_FILES
    assert len({path.stat().st_mode for path in hf.iterdir()}) == 1  # whoever may read one may read all
    tokenizer = AutoTokenizer.from_pretrained(hf, trust_remote_code=True, add_bos_token=True)
    model, report = AutoModelForCausalLM.from_pretrained(hf, trust_remote_code=True, output_loading_info=True)
    assert not any(report.values())
    prompts = ["the cat", "birds sing in the morning. " * 9]  # the second is longer than a block
    batch = tokenizer(prompts, padding=True, return_tensors="pt")
    texts = tokenizer.batch_decode(model.generate(**batch, max_new_tokens=30), skip_special_tokens=True)
    ours, greedy = load_run(str(trained), device="cpu"), SamplingConfig(temperature=0.0)
    for prompt, text in zip(prompts, texts, strict=True):
        assert text == sample_text(ours.model, ours.tokenizer, prompt, greedy, windows=ours.windows, new_tokens=30)


def test_other_programs_are_told_the_length_of_training(hf: Path) -> None:
    """Past it, positions exist that no token was ever trained at; lm-evaluation-harness cuts texts to what it reads."""
    assert json.loads((hf / "config.json").read_text())["max_position_embeddings"] == 256
    assert json.loads((hf / "tokenizer_config.json").read_text())["model_max_length"] == 256


def test_a_loaded_model_can_be_saved_and_loaded_again(hf: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(hf, trust_remote_code=True)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True)
    tokens = torch.arange(200)[None]
    assert torch.equal(model(tokens).logits, again(tokens).logits)


def test_the_weights_may_be_loaded_in_bf16(hf: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(hf, trust_remote_code=True, dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16
    exact = AutoModelForCausalLM.from_pretrained(hf, trust_remote_code=True)
    tokens = torch.arange(200)[None]
    torch.testing.assert_close(model(tokens).logits, exact(tokens).logits, rtol=0, atol=0.1)


def test_plain_weights_load_into_our_model(trained: Path, tmp_path: Path) -> None:
    assert main(["export", str(trained), "--to", "safetensors", "--out", str(tmp_path / "plain")]) == 0
    facts = json.loads((tmp_path / "plain" / "architecture.json").read_text())
    model = GPT(from_dict(ModelConfig, facts["model"]), end_of_text=facts["end_of_text"])
    model.load_state_dict(load_file(tmp_path / "plain" / "model.safetensors"))
    ours = load_run(str(trained), device="cpu")
    assert (facts["step"], facts["window_tokens"]) == (12, list(ours.windows))
    for name, parameter in ours.model.state_dict().items():
        assert torch.equal(parameter, model.state_dict()[name])


def test_a_checkpoint_is_chosen_by_its_step(trained: Path, tmp_path: Path) -> None:
    words = ["export", str(trained), "--to", "safetensors", "--checkpoint", "9", "--out", str(tmp_path / "nine")]
    assert main(words) == 0
    newest = read_saved(str(trained)).checkpoint.model
    found = load_file(tmp_path / "nine" / "model.safetensors")
    assert found.keys() == newest.keys()
    assert not torch.equal(found["head"], newest["head"])


def test_the_card_tells_preset_difference_loss_and_data(trained: Path, hf: Path, tmp_path: Path) -> None:
    card, text = read_card(trained), (hf / "README.md").read_text()
    assert "| preset | demo |" in text
    assert f"{card.val_loss:.4f} nats per token" in text
    assert card.data_fingerprint in text
    assert "The configuration is that of the preset" in text
    export(read_saved(str(trained), step=9), "hf", tmp_path / "nine")  # validations were after 0, 4, 8 and 12 steps
    assert "| validation loss | not measured at this step |" in (tmp_path / "nine" / "README.md").read_text()


def test_the_card_lists_what_differs_from_the_preset(trained: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(trained, tmp_path / "run")
    change = {"field": "model.softcap", "before": 15.0, "after": None}
    card = json.loads((copy / "card.json").read_text()) | {"diff": [change]}
    (copy / "card.json").write_text(json.dumps(card))
    export(read_saved(str(copy)), "hf", tmp_path / "out")
    assert "| `model.softcap` | 15.0 | None |" in (tmp_path / "out" / "README.md").read_text()


def test_a_folder_that_is_not_empty_is_refused(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").write_text("kept")
    assert f"--out {tmp_path}: is not empty" in refusal(capsys, trained, "--out", tmp_path)
    assert "is a file" in refusal(capsys, trained, "--out", tmp_path / "mine")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_an_empty_folder_is_filled_also_the_one_we_are_in(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder := tmp_path / "empty").mkdir()
    monkeypatch.chdir(folder)
    assert main(["export", str(trained), "--out", "."]) == 0
    assert {path.name for path in folder.iterdir()} == HF_FILES


def test_a_run_without_a_checkpoint_is_refused(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(trained, tmp_path / "run", ignore=shutil.ignore_patterns("step_*"))
    assert "holds no checkpoint, though the run has made" in refusal(capsys, copy, "--out", tmp_path / "out")
    assert "none was saved yet" in refusal(capsys, copy, "--out", tmp_path / "out", "--checkpoint", 12)
    assert "no such run" in refusal(capsys, tmp_path / "nothing", "--out", tmp_path / "out")


def test_a_step_without_a_good_checkpoint_is_refused(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "there are 9, 12" in refusal(capsys, trained, "--out", tmp_path / "out", "--checkpoint", 10)
    copy = shutil.copytree(trained, tmp_path / "run")
    weights = next(RunFolder(copy).checkpoint(12).glob("model*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1])
    assert "is damaged" in refusal(capsys, copy, "--out", tmp_path / "out", "--checkpoint", 12)
    assert not (tmp_path / "out").exists()


def test_a_lost_tokenizer_is_named(trained: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(trained, tmp_path / "run")
    (copy / "tokenizer.json").unlink()
    saved = read_saved(str(copy))
    config = replace(saved.config, data=replace(saved.config.data, tokenizer="bpe-300"))
    with pytest.raises(RunError, match=re.escape(str(copy / "tokenizer.json")) + ".*--to safetensors"):
        export(replace(saved, config=config), "hf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_full_disk_leaves_nothing_behind(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(exporting, "save_file", full)
    with pytest.raises(PacelineError, match="No space left on device"):
        export(read_saved(str(trained)), "hf", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_run_without_a_card_is_refused(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = shutil.copytree(trained, tmp_path / "run")
    (copy / "card.json").unlink()
    assert "card.json: does not exist" in refusal(capsys, copy, "--out", tmp_path / "out")
    write_card(copy, read_card(trained))
    assert main(["export", str(copy), "--out", str(tmp_path / "out")]) == 0


def test_writing_an_export_does_not_import_transformers() -> None:
    code = "import sys, paceline.evaluate.export.export; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
