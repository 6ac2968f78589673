"""`paceline train --resume` through the command line, when something beside the checkpoints is not as it was left."""

import contextlib
import json
import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from paceline.checkpoint.manifest import FileEntry, write_manifest
from paceline.checkpoint.run_folder import RunFolder, step_of
from paceline.checkpoint.verified import read_manifest
from paceline.cli import main
from paceline.core.files import blake2b_of
from paceline.metrics.card import read_card
from paceline.train.gradient_step import GradientStep
from train.killing import assert_same, left_by, train
from train.tiny import losses

STEPS = 9


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`whole` is finished; `cut` has checkpoints of steps 5 and 8."""
    folder = tmp_path_factory.mktemp("resume")
    assert main(train(folder, "whole", STEPS)) == 0
    assert main([*train(folder, "cut", STEPS), "--train.stop-after", "8"]) == 0
    return folder


@pytest.fixture
def cut(folder: Path, tmp_path: Path) -> RunFolder:
    return RunFolder(shutil.copytree(folder / "cut", tmp_path / "run"))


def resumed(run: RunFolder, *words: str) -> int:
    return main(["train", "--resume", str(run.path), "--no-finish", "--train.stop-after", "None", *words])


def newer(path: Path) -> None:
    """A config with a setting that this version does not know."""
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "flux": {"capacity": 1.21}}))


def vouched_for(folder: Path) -> None:
    """A manifest with the hashes of the files as they are."""
    known = [entry.name for entry in read_manifest(folder).files]
    entries = [
        FileEntry(name=name, bytes=(folder / name).stat().st_size, blake2b=blake2b_of(folder / name)) for name in known
    ]
    write_manifest(folder, step_of(folder), entries)


def test_a_checkpoint_of_a_newer_version_is_passed_over(
    cut: RunFolder, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newer(cut.checkpoint(8) / "config.json")
    vouched_for(cut.checkpoint(8))
    assert resumed(cut) == 0
    said = capsys.readouterr().out
    assert "passed over step_000008: config.json.flux: unknown key" in said
    assert "resumed from step_000005" in said
    assert_same(left_by(cut.path), left_by(folder / "whole"))


@pytest.mark.parametrize("spoil", [newer, Path.unlink, lambda path: path.write_text("{")])
def test_a_run_that_lost_its_config_takes_it_from_the_checkpoint(
    spoil: object, cut: RunFolder, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(cut.config)  # type: ignore[operator]
    assert resumed(cut) == 0
    assert "the config is taken from step_000008" in capsys.readouterr().out
    assert_same(left_by(cut.path), left_by(folder / "whole"))


def test_a_run_that_lost_its_card_gets_a_new_one(
    cut: RunFolder, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (cut.path / "card.json").write_text('{"format": 1')
    assert resumed(cut) == 0
    assert "a new card, since the old one is lost" in capsys.readouterr().out
    card = read_card(cut.path)
    assert card.finished
    assert [row[0] for row in card.losses] == [0, 6, 9]
    assert_same(left_by(cut.path), left_by(folder / "whole"))


def test_a_run_killed_before_its_first_checkpoint_begins_anew(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    early, take = RunFolder(folder / "early"), GradientStep.take

    def struck(*given: Any, **options: Any) -> Any:
        assert len(losses(early.path)) < 3, "struck"
        return take(*given, **options)

    with monkeypatch.context() as patched:
        patched.setattr(GradientStep, "take", struck)
        with pytest.raises(AssertionError, match="struck"):
            main(train(folder, "early", STEPS))
    assert len(losses(early.path)) == 3
    assert resumed(early) == 0
    assert_same(left_by(early.path), left_by(folder / "whole"))
    card = read_card(early.path)
    assert (card.restarts, card.tokens) == (0, STEPS * 512)


def test_all_checkpoints_damaged_is_one_line_that_names_them(
    cut: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (5, 8):
        (cut.checkpoint(step) / "state.json").write_text("{}")
    assert resumed(cut) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert all(f"step_00000{step}: state.json: 2 bytes instead of" in said for step in (5, 8))


def test_a_checkpoint_whose_metrics_are_lost_is_passed_over(
    cut: RunFolder, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first_bytes = json.loads((cut.checkpoint(5) / "state.json").read_text())["metrics_bytes"]
    whole = cut.metrics.read_bytes()
    cut.metrics.write_bytes(whole[: first_bytes + 10])
    assert resumed(cut) == 0
    said = capsys.readouterr().out
    assert f"passed over step_000008: metrics.jsonl holds {first_bytes + 10:,} bytes" in said
    assert_same(left_by(cut.path), left_by(folder / "whole"))


def test_metrics_that_no_checkpoint_can_do_with_are_to_be_put_back(
    cut: RunFolder, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = cut.metrics.read_bytes()
    cut.metrics.unlink()
    assert resumed(cut) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "holds 0 bytes" in said
    assert "put the file back" in said
    cut.metrics.write_bytes(whole)
    assert resumed(cut) == 0
    assert_same(left_by(cut.path), left_by(folder / "whole"))


def test_latest_is_the_newest_run(cut: RunFolder, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.chdir(cut.path.parent)
    Path("runs").mkdir()
    cut.path.rename("runs/newest")
    assert main(["train", "--resume", "latest", "--no-finish", "--train.stop-after", "None"]) == 0
    assert read_card(Path("runs/newest")).finished


def test_a_rewind_needs_a_run_and_a_checkpoint(cut: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "demo", "--rewind", "5"]) == 2
    assert "--rewind 5 needs a run to go back in" in capsys.readouterr().err
    assert resumed(cut, "--rewind", "4") == 2
    assert "none is of step 4 or before" in capsys.readouterr().err
    assert resumed(cut, "--rewind", "7") == 0
    assert "data go on at token 4,196" in capsys.readouterr().out
    assert read_card(cut.path).finished


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("r99-nonsense",), "r99-nonsense: --resume "),
        (("r18-softcap",), "is a run of demo; leave it out"),
        (("--scale", "1/4"), "--scale 1/4: --resume goes on in"),
        (("--scale=1",), "--scale 1: --resume goes on in"),
        (("--out", "elsewhere"), "--out elsewhere: --resume goes on in"),
    ],
)
def test_what_a_resumed_run_cannot_be_is_refused(
    words: tuple[str, ...], said: str, cut: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *words, "--resume", str(cut.path)]) == 2
    found = capsys.readouterr().err
    assert said in found
    assert found.count("\n") == 1


def test_a_resumed_run_may_be_called_by_its_preset(cut: RunFolder) -> None:
    assert main(["train", "demo", "--resume", str(cut.path), "--no-finish", "--train.stop-after", "None"]) == 0
    assert read_card(cut.path).finished


@pytest.mark.parametrize("flag", ["--out", "--resume"])
def test_an_empty_folder_name_is_refused(
    flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "demo", flag, ""]) == 2
    said = capsys.readouterr().err
    assert "'': names no" in said
    assert said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root may mount a small disk")
def test_a_disk_that_really_fills_up(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", disk], check=False).returncode:
        pytest.skip("this system mounts no tmpfs")
    try:
        run = RunFolder(shutil.copytree(folder / "cut", disk / "run"))
        ballast = disk / "ballast"
        with contextlib.suppress(OSError), open(ballast, "wb") as file:
            for _ in range(3 * 1024):
                file.write(bytes(1024))
                file.flush()
        assert resumed(run, "--checkpoint.every", "1") == 1
        assert "No space left on device" in capsys.readouterr().err
        ballast.unlink()
        assert resumed(run) == 0
        assert_same(left_by(run.path), left_by(folder / "whole"))
    finally:
        subprocess.run(["umount", disk], check=True)


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """A disk that takes no more, as far as one file can tell."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("size", [20_000, 2_200, 300])  # too small for the tensors, the next line of metrics, the card
def test_a_full_disk_ends_in_one_line_and_the_run_goes_on_later(
    size: int, cut: RunFolder, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with files_of_at_most(size):
        assert resumed(cut, "--checkpoint.every", "1") == 1
    said = capsys.readouterr().err
    assert said.startswith("paceline: ")
    assert said.count("\n") == 1
    assert "File too large" in said
    assert "--resume" in said
    assert resumed(cut) == 0
    assert_same(left_by(cut.path), left_by(folder / "whole"))


def test_a_start_that_wrote_nothing_is_made_again_and_not_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = train(tmp_path, "new", 1)
    with files_of_at_most(10):  # too small for config.json
        assert main(words) == 1
    said = capsys.readouterr().err
    assert "config.json: cannot be written (File too large); run the same command again\n" in said
    assert not (tmp_path / "new").exists()
    assert main(words) == 0
