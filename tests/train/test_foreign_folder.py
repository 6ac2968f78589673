"""A run folder from somebody else: nothing outside it is written, deleted or believed, and no code of it is loaded."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.analysis.runs import read_run
from paceline.checkpoint.manifest import FileEntry, write_manifest
from paceline.checkpoint.run_folder import RunFolder
from paceline.checkpoint.verified import read_manifest
from paceline.cli import main
from paceline.core.errors import RunError
from paceline.core.files import blake2b_of
from paceline.core.lock import LOCK_FILE
from train import frozen
from train.tiny import write_text_shards

STEP = "checkpoints/step_000003"
LINKED = ["metrics.jsonl", "card.json", "config.json", "tokenizer.json", "checkpoints", STEP, f"{STEP}/state.json"]
VERBS = {
    "resume": ["train", "--train.stop-after", "None", "--no-finish", "--resume"],
    "evaluate": ["evaluate"],
    "sample": ["sample"],
    "export": ["export", "--out", "exported"],
    "report": ["report"],
    "verify": ["verify"],
}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_text_shards(frozen.DATA)
    return Path(shutil.copytree(frozen.FOLDER / "format-3", "run"))


def content(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def answered(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line with which a command refuses."""
    assert main(words) == 2
    said = capsys.readouterr()
    assert not said.out
    assert len(said.err.splitlines()) == 1
    return said.err


@pytest.mark.parametrize("name", LINKED)
def test_a_link_out_of_the_folder_is_refused_and_nothing_there_changes(
    run: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    outside = Path("outside", name)
    outside.parent.mkdir(parents=True)
    shutil.move(run / name, outside)
    (run / name).symlink_to(outside.resolve())
    before = content(Path("outside"))
    for verb, words in VERBS.items():
        assert f"{run / name}: is a link out of the run's folder, to /" in answered([*words, str(run)], capsys), verb
    with pytest.raises(RunError, match="is a link out of"):  # as compare and board read it
        read_run(run)
    assert content(Path("outside")) == before


def test_a_folder_for_a_new_run_may_not_lead_elsewhere(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("out").mkdir()
    for name in ("metrics.jsonl", LOCK_FILE):
        Path("out", name).symlink_to(Path("precious").resolve())
    Path("precious").write_text("kept")
    assert "is a link out of" in answered(["train", "demo", "--out", "out"], capsys)
    assert Path("precious").read_text() == "kept"
    Path("precious").unlink()
    assert "is a link out of" in answered(["train", "demo", "--out", "out"], capsys)
    assert not Path("precious").exists()


def test_links_inside_the_folder_and_to_the_folder_are_followed(run: Path) -> None:
    (run / "kept").mkdir()
    shutil.move(run / "metrics.jsonl", run / "kept")
    (run / "metrics.jsonl").symlink_to(Path("kept", "metrics.jsonl"))
    Path("alias").symlink_to(run)
    assert main(["verify", "alias"]) == 0


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "metrics.jsonl").unlink()
    os.mkfifo(run / "metrics.jsonl")
    assert "metrics.jsonl: is neither a file nor a folder" in answered(["verify", str(run)], capsys)


def changed(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values).replace("Infinity", "1e999"))


def test_a_configs_library_is_not_loaded_which_is_said_once(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.ops.load_library", lambda path: pytest.fail(f"{path} is loaded"))
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    changed(run / "config.json", lambda config: config["attention"].update(fa3_library="/tmp/theirs.so"))
    assert main(VERBS["resume"] + [str(run)]) == 0
    assert capsys.readouterr().err.count("attention.fa3_library '/tmp/theirs.so' is not loaded") == 1
    newest = RunFolder(run).checkpoints()[-1]
    assert "fa3_library" not in json.loads((newest / "config.json").read_text())["attention"]


def forge(run: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Another config, also in the checkpoint, which vouches for it."""
    for folder in (run, run / STEP):
        changed(folder / "config.json", change)
    names = [entry.name for entry in read_manifest(run / STEP).files]
    files = [run / STEP / name for name in names]
    entries = [FileEntry(name=file.name, bytes=file.stat().st_size, blake2b=blake2b_of(file)) for file in files]
    write_manifest(run / STEP, 3, entries)


@pytest.mark.parametrize(
    ("setting", "value", "why"),
    [
        ("steps", 0, "--steps 0 must be at least 1"),
        ("model.vocab_size", 10**9, "head is torch.float32 (257, 8)"),
        ("model.num_layers", 4, "blocks.2"),
        ("model.mlp_ratio", 3, "(24, 8)"),
        ("model.precision.embeddings", "bf16", "embeddings.token"),
        ("model.rotary.max_tokens", 10**12, "max-tokens 1000000000000"),
        ("optim.clip_norm", 1e999, "clip-norm"),
    ],
)
def test_a_config_that_does_not_fit_its_weights_is_refused(
    run: Path, setting: str, value: Any, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    *path, leaf = setting.split(".")

    def change(config: dict[str, Any]) -> None:
        for name in path:
            config = config[name]
        config[leaf] = value

    forge(run, change)
    for verb in ("resume", "evaluate", "sample", "export"):
        assert why in answered([*VERBS[verb], str(run)], capsys), verb
    assert not Path("exported").exists()


def test_half_of_a_character_on_a_card_is_answered_in_one_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changed(run / "card.json", lambda card: card.update(name="a\ud800"))
    for verb in ("report", "evaluate", "export"):
        assert "card.json: not valid JSON" in answered([*VERBS[verb], str(run)], capsys), verb
