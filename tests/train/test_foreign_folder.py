"""A run folder from somebody else: nothing outside it is written, deleted or believed, and no code of it is loaded."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.analysis.runs import read_run
from paceline.checkpoint.manifest import MANIFEST, FileEntry, write_manifest
from paceline.checkpoint.run_folder import RunFolder
from paceline.cli import main
from paceline.core.errors import RunError
from paceline.core.files import blake2b_of
from paceline.core.lock import LOCK_FILE
from paceline.text.tokenizer import TrainedTokenizer, byte_letters
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


def vouch(run: Path) -> None:
    """A manifest that fits the checkpoint's files as they are now."""
    files = [path for path in sorted((run / STEP).iterdir()) if path.name != MANIFEST]
    entries = [FileEntry(name=file.name, bytes=file.stat().st_size, blake2b=blake2b_of(file)) for file in files]
    write_manifest(run / STEP, 3, entries)


def forge(run: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Another config, also in the checkpoint, which vouches for it."""
    for folder in (run, run / STEP):
        changed(folder / "config.json", change)
    vouch(run)


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


@pytest.mark.parametrize("pattern", ["", "/etc/*", "***"])
@pytest.mark.parametrize("side", ["train", "val"])
def test_a_pattern_of_shards_that_is_none_is_refused(
    run: Path, side: str, pattern: str, capsys: pytest.CaptureFixture[str]
) -> None:
    forge(run, lambda config: config["data"].update({side: pattern}))
    for verb in ("resume", "evaluate"):
        assert f"{pattern!r} is no pattern of files" in answered([*VERBS[verb], str(run)], capsys), verb


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("cursor", "position", -1),
        ("cursor", "position", 10**30),
        ("clocks", "timed_steps", -(10**30)),
        ("clocks", "wall_s", -1.0),
        ("history", "rewinds", 2**63),
        (None, "metrics_bytes", -1),
    ],
)
def test_a_number_that_no_run_has_is_refused_by_name(
    run: Path, part: str | None, name: str, value: float, capsys: pytest.CaptureFixture[str]
) -> None:
    changed(
        run / STEP / "state.json", lambda state: (state.setdefault(part, {}) if part else state).update({name: value})
    )
    vouch(run)
    assert f"{name} is {value}, which no run of ours has" in answered([*VERBS["resume"], str(run)], capsys)


@pytest.mark.parametrize(
    ("group", "name", "other", "why"),
    [
        ("random", "0/python", torch.arange(1252), "random states: not those of a process"),
        ("random", "0/torch", torch.zeros(5056, dtype=torch.uint8), "random states: not those of a process"),
        ("random", "0/numpy", torch.full((626,), 10**6), "random states: not those of a process"),
        ("random", "0/numpy_normal", None, "random states: not those of a process"),
        ("bad_steps", "state", torch.zeros((), dtype=torch.float64), "bad_steps: state is not what this run keeps"),
        ("bad_steps", "state", torch.full((8,), torch.nan, dtype=torch.float64), "bad_steps: its counts"),
        ("buffers", "scale", torch.ones(3), "buffers: scale is not what this run keeps"),
    ],
)
def test_a_state_that_is_not_the_runs_is_refused(
    run: Path, group: str, name: str, other: Tensor | None, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run / STEP / f"{group}-00001.safetensors"
    tensors = load_file(path) if path.exists() else {}
    save_file({key: value for key, value in {**tensors, name: other}.items() if value is not None}, path)
    vouch(run)
    assert main([*VERBS["resume"], str(run)]) == 2
    said = capsys.readouterr().err
    assert why in said
    assert len(said.splitlines()) == 1
    if group == "buffers":
        for verb in ("evaluate", "sample"):
            assert why in answered([*VERBS[verb], str(run)], capsys), verb


def test_an_average_of_other_weights_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({"no.such.weight": torch.ones(2)}, run / STEP / "average-00001.safetensors")

    def averaging(config: dict[str, Any]) -> None:
        config["steps"] = 3
        config["optim"]["average"]["tau_steps"] = 2

    forge(run, averaging)
    for verb in ("evaluate", "sample", "export"):
        assert "average: no.such.weight is not what this run keeps" in answered([*VERBS[verb], str(run)], capsys), verb


def put_tokenizer(run: Path, vocabulary: list[str], merges: list[list[str]], fingerprint: str | None = None) -> None:
    """As theirs would be, with the fingerprint that it should have."""
    rules: dict[str, Any] = {"vocabulary": vocabulary, "merges": merges}
    fingerprint = fingerprint or TrainedTokenizer("bpe-300", **rules).fingerprint
    values = {"name": "bpe-300", "end_of_text": 0, "fingerprint": fingerprint, "rules": rules}
    (run / "tokenizer.json").write_text(json.dumps(values))


def test_a_tokenizer_that_is_not_the_models_gives_no_figures(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put_tokenizer(run, ["end", "a"], [])
    assert "its tokenizer: not the tokenizer that data/" in answered(["evaluate", str(run)], capsys)
    assert main(["sample", str(run), "--tokens", "30"]) == 0  # most of its ids stand for nothing
    capsys.readouterr()
    put_tokenizer(run, ["end", *(left + right for left in byte_letters().values() for right in "ab")], [])
    for verb in ("evaluate", "sample"):
        assert "bpe-300 has 513 tokens, the model 257" in answered([*VERBS[verb], str(run)], capsys), verb


@pytest.mark.parametrize("vocabulary", [["end", "a", "a"], ["end", "a", "b"], ["end", "a"]])
def test_merges_that_the_library_would_panic_at_are_not_given_to_it(
    run: Path, vocabulary: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    put_tokenizer(run, vocabulary, [["a", "b"]], fingerprint="0" * 32)
    assert main(["sample", str(run)]) == 2
    said = capfd.readouterr().err
    assert "tokenizer.json: not a saved tokenizer" in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize("row", [[], [3], [3, 2.5, 1.5, 0.1, 0.2, 7]])
def test_a_validation_of_more_or_fewer_figures_is_no_reason_to_export_nothing(run: Path, row: list[float]) -> None:
    changed(run / "card.json", lambda card: card.update(losses=[row]))
    assert main(["export", str(run), "--out", "exported"]) == 0


def test_a_file_of_terabytes_that_holds_nothing_is_not_read(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A hole takes no room in what is sent."""
    os.truncate(run / "metrics.jsonl", 1 << 43)
    for verb in ("report", "resume"):
        assert "without the end of a line" in answered([*VERBS[verb], str(run)], capsys), verb
    assert main(["verify", str(run)]) == 1
    assert "without the end of a line" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["model.safetensors", "state.json"])
def test_nor_one_whose_size_its_manifest_does_not_state(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(shutil.copytree(frozen.FOLDER / "format-1", tmp_path / "old"))
    os.truncate(run / STEP / name, 1 << 43)
    assert main(["verify", str(run)]) == 1
    assert "8,796,093,022,208 bytes, but it claims" in capsys.readouterr().out
