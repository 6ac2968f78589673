"""`paceline train` and `paceline sample` from the command line to the files and the text they leave."""

import json
import re
import shutil
from pathlib import Path

import pytest

from paceline.cli import main
from paceline.core.schema import read_json
from train.tiny import write_text_shards

pytestmark = pytest.mark.journey
FLAGS = {
    "--steps": 4,
    "--model.vocab-size": 257,
    "--model.width": 24,
    "--model.head-dim": 4,
    "--data.tokenizer": "bytes",
    "--data.end-of-text": 256,
    "--batch.sequence-tokens": 256,
    "--batch.tokens": 512,
    "--batch.micro-tokens": 256,
    "--evaluate.every": 2,
    "--evaluate.tokens": 0,
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that the command has made."""
    folder = tmp_path_factory.mktemp("command")
    write_text_shards(folder / "data")
    flags = FLAGS | {"--data.dir": folder / "data", "--out": folder / "run"}
    words = [str(word) for flag in flags.items() for word in flag]
    assert main(["train", "r18-softcap", "--scale", "1/16", *words]) == 0
    return folder / "run"


def test_a_run_leaves_card_metrics_checkpoint_sample_and_report(trained: Path) -> None:
    card = json.loads((trained / "card.json").read_text())
    assert card["finished"]
    assert card["preset"] == "r18-softcap"
    assert [row[0] for row in card["losses"]] == [0, 2, 4]
    assert card["val_loss"] < card["losses"][0][1]
    assert isinstance(card["sample"], str)
    assert 0 < card["gzip_bpb"] < 8
    assert "<html" in (trained / "report.html").read_text()
    assert read_json(trained / "config.json")["steps"] == 4
    assert [path.name for path in (trained / "checkpoints").iterdir()] == ["step_000004"]
    kinds = [json.loads(line)["kind"] for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert kinds == ["eval", "step", "step", "eval", "step", "step", "eval"]


@pytest.mark.parametrize(("steps", "loss"), [(1, ""), (3, r", last validated at step 2: \S+ \(.*\)")])
def test_a_stopped_run_tells_a_loss_with_its_step_and_never_that_of_step_0(
    steps: int, loss: str, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped = {"--data.dir": trained.parent / "data", "--out": tmp_path / "run", "--train.stop-after": steps}
    words = [str(word) for flag in (FLAGS | stopped).items() for word in flag]
    main(["train", "r18-softcap", "--scale", "1/16", "--no-finish", *words])
    told = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(rf"\S+: stopped after step {steps}{loss}, \S+ since launch; continue with --resume \S+", told)


@pytest.mark.parametrize("flags", [(), ("--no-stream",), ("--temperature", "0")])
def test_sample_prints_the_prompt_and_what_follows(
    flags: tuple[str, ...], trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = []
    for _ in range(2):
        assert main(["sample", str(trained), "--prompt", "the cat", "--tokens", "20", *flags]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]
    assert said[0].startswith("the cat")
    assert len(said[0]) > len("the cat\n")


# ---- mistakes


def mistake(capfd: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line that ends a wrong `sample` with exit code 2."""
    assert main(["sample", *argv]) == 2
    said = capfd.readouterr().err
    assert said.startswith("paceline: ")
    assert said.count("\n") == 1
    return said


@pytest.fixture
def copied(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def test_a_run_that_is_missing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert "nowhere: no such run" in mistake(capfd, str(tmp_path / "nowhere"))


def test_a_folder_whose_start_was_interrupted(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    assert "no config.json in it" in mistake(capfd, str(tmp_path / "run"))


def test_a_run_whose_checkpoints_are_gone(copied: Path, capfd: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(copied / "checkpoints")
    assert "checkpoints: is not there, though the run has made" in mistake(capfd, str(copied))


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"model": {}}'])
def test_a_config_that_is_half_written_is_taken_from_the_checkpoint(
    text: str, copied: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (copied / "config.json").write_text(text)
    assert main(["sample", str(copied), "--tokens", "3"]) == 0
    capfd.readouterr()
    shutil.rmtree(copied / "checkpoints")
    assert "config" in mistake(capfd, str(copied))


@pytest.mark.parametrize(
    "name", ["model-00001.safetensors", "optimizer-00001.safetensors", "state.json", "manifest.json"]
)
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_checkpoint_that_is_cut_off(name: str, share: float, copied: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = copied / "checkpoints" / "step_000004" / name
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    said = mistake(capfd, str(copied))
    assert "no usable checkpoint (step_000004: " in said
    assert name in said


@pytest.mark.parametrize("name", ["model-00001.safetensors", "manifest.json"])
def test_a_checkpoint_that_lacks_a_file(name: str, copied: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (copied / "checkpoints" / "step_000004" / name).unlink()
    assert name in mistake(capfd, str(copied))


@pytest.mark.parametrize("text", [None, "", "{", "[]", "{}"])
def test_a_tokenizer_that_is_missing_or_damaged(
    text: str | None, copied: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = next(path for path in copied.iterdir() if "tokenizer" in path.name)
    path.unlink()
    if text is not None:
        path.write_text(text)
        assert "tokenizer" in mistake(capfd, str(copied))
    else:
        assert main(["sample", str(copied), "--tokens", "3"]) == 0  # bytes need no file


def test_a_prompt_that_is_too_long(trained: Path, capfd: pytest.CaptureFixture[str]) -> None:
    said = mistake(capfd, str(trained), "--prompt", "a" * 65_536)
    assert "but the model has positions for 65,536" in said


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--heat", "1"), "--heat"),
        (("--tokens", "0"), "--tokens 0 must be at least 1"),
        (("--tokens", "many"), "--tokens"),
        (("--temperature", "-1"), "--temperature -1.0 must be a number from 0 on"),
        (("--top-k", "0"), "--top-k 0 must be at least 1"),
        (("--top-p", "2"), "--top-p 2.0 is outside (0, 1]"),
    ],
)
def test_flags_that_mean_nothing(
    flags: tuple[str, ...], words: str, trained: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert words in mistake(capfd, str(trained), *flags)


def test_a_launch_that_is_refused_leaves_no_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    for out in ((), ("--out", "new"), ("--out", "mine")):
        assert main(["train", "demo", "--data.dir", "nowhere", *out]) == 2
    assert [str(path.relative_to(tmp_path)) for path in sorted(tmp_path.rglob("*"))] == ["mine", "runs"]
