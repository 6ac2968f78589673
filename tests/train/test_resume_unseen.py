"""What a resumed run cannot see is never taken for something that was not there: checkpoints and lines of metrics."""

import json
import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.checkpoint.run_folder import RunFolder
from paceline.cli import main
from paceline.metrics.card import read_card
from paceline.metrics.metrics_file import read_metrics, readable, rebuild
from train.killing import assert_same, left_by, train

STEPS = 9
Hide = Callable[[Path], object]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`whole` is finished; `cut` has checkpoints of steps 5 and 8."""
    folder = tmp_path_factory.mktemp("unseen")
    assert main(train(folder, "whole", STEPS)) == 0
    assert main([*train(folder, "cut", STEPS), "--train.stop-after", "8"]) == 0
    return folder


@pytest.fixture
def cut(folder: Path, tmp_path: Path) -> RunFolder:
    return RunFolder(shutil.copytree(folder / "cut", tmp_path / "run"))


def resumed(run: RunFolder, *words: str) -> int:
    return main(["train", "--resume", str(run.path), "--no-finish", "--train.stop-after", "None", *words])


def content(folder: Path) -> dict[str, Any]:
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def moved_behind_a_link(checkpoints: Path) -> None:
    """To a disk that is not mounted. A link that leaves the run's folder is refused as such (test_foreign_folder)."""
    checkpoints.rename(checkpoints.with_name("elsewhere"))
    checkpoints.symlink_to("disk/checkpoints")


def emptied(checkpoints: Path) -> None:
    """As the folder under which a disk was mounted."""
    shutil.rmtree(checkpoints)
    checkpoints.mkdir()


def a_file(checkpoints: Path) -> None:
    shutil.rmtree(checkpoints)
    checkpoints.write_text("")


HIDDEN: list[tuple[Hide, str]] = [
    (
        moved_behind_a_link,
        "is a link to disk/checkpoints, which is not there, though the run has made 8 steps",
    ),
    (shutil.rmtree, "is not there, though the run has made 8 steps"),
    (emptied, "holds no checkpoint, though the run has made 8 steps"),
    (a_file, "cannot be read (Not a directory), though the run has made 8 steps"),
]


@pytest.mark.parametrize(("hide", "said"), HIDDEN)
@pytest.mark.parametrize("words", [(), ("--rewind", "5")])
def test_checkpoints_that_cannot_be_seen_are_named_and_nothing_changes(
    hide: Hide, said: str, words: tuple[str, ...], cut: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    hide(cut.path / "checkpoints")
    before = content(cut.path)
    assert resumed(cut, *words) == 2
    found = capsys.readouterr().err
    assert found == (
        f"paceline: {cut.path}/checkpoints: {said}; put it back, or begin anew with --resume {cut.path} --restart\n"
    )
    assert content(cut.path) == before
    assert main(["verify", str(cut.path)]) == 1
    assert f"checkpoints: {said}" in capsys.readouterr().out


@pytest.mark.parametrize("lost", ["card.json", "metrics.jsonl"])
def test_card_or_metrics_alone_show_that_steps_were_made(
    lost: str, cut: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(cut.path / "checkpoints")
    (cut.path / lost).unlink()
    assert resumed(cut) == 2
    assert "though the run has made 8 steps" in capsys.readouterr().err


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root may become somebody else")
@pytest.mark.parametrize(("unreadable", "rights"), [("checkpoints", 0), ("checkpoints", 0o111), ("run", 0)])
def test_a_folder_without_the_right_to_read_it_is_refused_and_called_unreadable(
    unreadable: str, rights: int, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rights stop everybody but root, so somebody else asks; in a place of its own, since pytest's are for one user."""
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o755)
        run = Path(shutil.copytree(folder / "cut", Path(place) / "run"))
        for path in (run, *run.rglob("*")):
            os.chown(path, 65_534, 65_534)
        ((run / unreadable) if unreadable != "run" else run).chmod(rights)
        before = content(run)
        for words in (["train", "--resume", str(run), "--no-finish"], ["verify", str(run)]):
            assert as_nobody(words) != 0
            said = "".join(capfd.readouterr())
            assert unreadable in said
            assert "cannot be read" in said
            assert "Permission denied" in said
            assert "Traceback" not in said
        assert content(run) == before


def as_nobody(words: list[str]) -> int | None:
    process = multiprocessing.get_context("fork").Process(target=_as_nobody, args=(words,))
    process.start()
    process.join()
    return process.exitcode


def _as_nobody(words: list[str]) -> None:
    os.setgroups([])
    os.setgid(65_534)
    os.setuid(65_534)
    os._exit(main(words))


def test_a_restart_begins_anew_and_keeps_the_old_files(
    cut: RunFolder, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moved_behind_a_link(cut.path / "checkpoints")
    old, spent = content(cut.path), read_card(cut.path)
    assert resumed(cut, "--restart") == 0
    assert f"what was there is in {cut.path}/set_aside_1" in capsys.readouterr().out
    assert_same(left_by(cut.path), left_by(folder / "whole"))
    aside = content(cut.path / "set_aside_1")
    assert all(aside[name] == old[name] for name in ("card.json", "config.json", "metrics.jsonl"))
    assert (cut.path / "set_aside_1" / "checkpoints").is_symlink()
    card = read_card(cut.path)
    assert (card.finished, card.restarts) == (True, 1)
    assert card.tokens == spent.tokens + STEPS * 512
    assert (card.train_s or 0) >= (spent.train_s or 0)
    assert (card.wall_s or 0) > (spent.wall_s or 0)


def test_a_restarted_run_that_is_killed_at_once_remembers_what_it_spent(
    cut: RunFolder, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(cut.path / "checkpoints")
    with monkeypatch.context() as patched:
        patched.setattr("paceline.train.run.Loop", None)  # before its first step
        with pytest.raises(TypeError):
            resumed(cut, "--restart")
    assert resumed(cut) == 0
    card = read_card(cut.path)
    assert (card.restarts, card.tokens) == (1, (8 + STEPS) * 512)
    assert_same(left_by(cut.path), left_by(folder / "whole"))


@pytest.mark.parametrize("words", [("--restart",), ("--allow-other-data",)])
def test_flags_of_a_resume_need_one(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "demo", *words]) == 2
    assert "name it with --resume" in capsys.readouterr().err


def test_a_restart_is_not_repeated_by_torchrun(
    cut: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    for words in (("--restart",), ("--rewind", "5")):
        assert resumed(cut, *words) == 2
        assert "--max-restarts would repeat it" in capsys.readouterr().err


# ---- metrics


@pytest.mark.parametrize(
    "line",  # of eight steps and the validations of steps 0 and 6
    [0, 4, 7, 9, *(pytest.param(line, marks=pytest.mark.slow) for line in (1, 2, 3, 5, 6, 8))],
)
def test_a_bad_byte_costs_a_line_at_most(
    line: int, cut: RunFolder, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = cut.metrics.read_bytes().splitlines(keepends=True)
    lost = json.loads(lines[line])
    lines[line] = lines[line][:9] + b"\xff" + lines[line][10:]
    cut.metrics.write_bytes(b"".join(lines))
    assert resumed(cut) == 0
    assert (cut.path / "metrics.jsonl.damaged").read_bytes() == b"".join(lines)
    said = capsys.readouterr().out
    note = "metrics.jsonl: 1 of 10 lines could not be read and are left out"
    assert note in said
    assert any(one.startswith(note) for one in read_card(cut.path).notes)
    steps, evaluations = read_metrics(cut.path)
    expected = [step for step in range(1, STEPS + 1) if lost["kind"] == "eval" or step != lost["step"]]
    assert [record.step for record in steps] == expected
    assert [record.step for record in evaluations] == [0, 6, STEPS], "kept by the checkpoint"
    assert [row[0] for row in read_card(cut.path).losses] == [0, 6, STEPS]
    assert left_by(cut.path)["evaluations"] == left_by(folder / "whole")["evaluations"]
    assert [json.loads(text)["kind"] for text in cut.metrics.read_text().splitlines()]  # for every reader of JSON


def test_two_lines_in_one_and_a_file_that_was_edited(cut: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    """A lost newline takes both its lines, and a removed byte what comes where the checkpoint cuts the file."""
    data = cut.metrics.read_bytes()
    at = data.index(b"\n", data.index(b'"step": 3'))
    cut.metrics.write_bytes(data[:at] + b"X" + data[at + 2 :] + b'{"kind": "st')
    assert resumed(cut) == 0
    assert "metrics.jsonl: 2 of 10 lines could not be read" in capsys.readouterr().out
    assert [record.step for record in read_metrics(cut.path)[0]] == [1, 2, 5, 6, 7, 8, 9]


def test_a_checkpoint_before_the_damage_still_finds_its_place(cut: RunFolder) -> None:
    data = bytearray(cut.metrics.read_bytes())
    data[data.index(b'"step": 2')] = 0
    cut.metrics.write_bytes(data)
    state = json.loads((cut.checkpoint(8) / "state.json").read_text())
    assert rebuild(cut.metrics, state["metrics_bytes"], ()) is not None
    assert rebuild(cut.metrics, state["metrics_bytes"], ()) is None, "once is enough"
    shutil.rmtree(cut.checkpoint(8))
    assert resumed(cut) == 0
    assert [record.step for record in read_metrics(cut.path)[0]] == [1, 3, 4, 5, 6, 7, 8, 9]


def test_metrics_that_are_sound_are_left_as_they_are(cut: RunFolder) -> None:
    before = cut.metrics.read_bytes()
    assert resumed(cut) == 0
    assert cut.metrics.read_bytes().startswith(before)
    assert len(readable(cut.metrics)) == STEPS + 3
