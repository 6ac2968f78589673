"""Runs whose console goes away, on real pipes, terminals and full disks: a console is not required, a hang-up is."""

import contextlib
import multiprocessing
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from paceline.checkpoint.run_folder import RunFolder
from paceline.cli import main
from paceline.metrics.card import read_card
from paceline.metrics.metrics_file import read_metrics
from train.killing import train
from train.tiny import run, tiny_config

pytestmark = pytest.mark.journey
STEPS = 30
LONG = 400
ENDS_S = 60.0


def command(words: list[str], out: str | None, err: str, *, leads: bool, ignores: bool) -> None:
    """A process of its own: its standard output is opened by name (None: closed), as its terminal if it `leads`."""
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_IGN if ignores else signal.SIG_DFL)  # whatever the tests run under
    os.dup2(os.open(err, os.O_WRONLY | os.O_CREAT), 2)
    if out is None:
        os.close(1)
    else:
        os.dup2(os.open(out, os.O_RDWR | os.O_CREAT | (0 if leads else os.O_NOCTTY)), 1)
    sys.stdout = None if out is None else open(1, "w", closefd=False)  # type: ignore[assignment] # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
    sys.exit(main(words))


class Started:
    def __init__(
        self, folder: Path, out: Path | str | None, *, steps: int = STEPS, leads: bool = False, ignores: bool = False
    ) -> None:
        self.run, self.err = folder / "run", folder / "err.txt"
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["train.victim"])
        given = (train(folder, "run", steps), None if out is None else str(out), str(self.err))
        self.process = context.Process(target=command, args=given, kwargs={"leads": leads, "ignores": ignores})
        with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):
            self.process.start()

    def ended(self) -> int:
        self.process.join(ENDS_S)
        code = self.process.exitcode
        self.process.kill()
        assert code is not None, self.said()
        return code

    def said(self) -> list[str]:
        return self.err.read_text(encoding="utf-8").splitlines()

    def trains(self) -> None:
        """Wait until steps are made."""
        deadline = time.monotonic() + ENDS_S
        while not (self.run / "metrics.jsonl").exists() or len(read_metrics(self.run)[0]) < 3:
            assert self.process.is_alive(), self.said()
            assert time.monotonic() < deadline
            time.sleep(0.02)


@pytest.fixture
def terminal() -> Iterator[tuple[int, str]]:
    """The keyboard's end of a terminal, and the name of the other, which only a run holds open."""
    master, slave = pty.openpty()
    name = os.ttyname(slave)
    yield master, name
    for handle in (master, slave):
        with contextlib.suppress(OSError):
            os.close(handle)


def assert_finished(run: Path, steps: int, *words: str) -> None:
    card = read_card(run)
    assert card.finished
    notes = [note for note in card.notes if "console" in note]
    assert len(notes) == 1, card.notes
    assert all(word in notes[0] for word in words), notes
    assert len(read_metrics(run)[0]) == steps
    assert RunFolder(run).checkpoints()[-1].name == f"step_{steps:06d}"


def test_a_run_behind_head_goes_on_to_its_end(tmp_path: Path) -> None:
    """As users type it."""
    words = train(tmp_path, "run", 16)
    shell = ["bash", "-c", 'set -o pipefail; "$@" | head -3', "bash", sys.executable, "-m", "paceline.cli", *words]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(shell, capture_output=True, text=True, timeout=ENDS_S, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 3
    assert done.stderr.splitlines() == ["paceline: standard output is lost: Broken pipe; going on without it"]
    assert_finished(tmp_path / "run", 16, "Broken pipe")


@pytest.mark.parametrize(("out", "why"), [("/dev/full", "No space left on device"), (None, "it is closed")])
def test_a_run_needs_no_standard_output(out: str | None, why: str, tmp_path: Path) -> None:
    started = Started(tmp_path, out, steps=16)
    assert started.ended() == 0, started.said()
    assert started.said() == [f"paceline: standard output is lost: {why}; going on without it"]
    assert_finished(started.run, 16, why)


def test_what_is_closed_is_not_taken_by_a_file(tmp_path: Path) -> None:
    """Libraries print to number 1 whatever it is."""
    script = (
        "import os, sys; from paceline.cli import main; main(['-V']); sys.stderr.write(os.readlink('/proc/self/fd/1'))"
    )
    shell = ["bash", "-c", '"$@" <&- >&-', "bash", sys.executable, "-c", script]
    done = subprocess.run(shell, capture_output=True, text=True, timeout=ENDS_S)
    assert done.stderr == "/dev/null"


def test_a_run_outlives_a_terminal_that_is_not_its_own(terminal: tuple[int, str], tmp_path: Path) -> None:
    """No signal comes then: the run was detached, as by setsid."""
    master, name = terminal
    started = Started(tmp_path, name)
    assert os.read(master, 1)
    os.close(master)
    assert started.ended() == 0, started.said()
    assert started.said() == ["paceline: standard output is lost: Input/output error; going on without it"]
    assert_finished(started.run, STEPS, "Input/output error")


def test_a_run_under_nohup_outlives_its_terminal(terminal: tuple[int, str], tmp_path: Path) -> None:
    master, name = terminal
    started = Started(tmp_path, name, leads=True, ignores=True)
    assert os.read(master, 1)
    os.close(master)
    assert started.ended() == 0, started.said()
    assert_finished(started.run, STEPS, "Input/output error")


def test_a_terminal_that_closes_ends_its_run_with_a_checkpoint(terminal: tuple[int, str], tmp_path: Path) -> None:
    master, name = terminal
    started = Started(tmp_path, name, steps=LONG, leads=True)
    started.trains()
    os.close(master)
    assert started.ended() == 128 + signal.SIGHUP, started.said()
    done = read_card(started.run).steps_done
    assert RunFolder(started.run).checkpoints()[-1].name == f"step_{done:06d}"


def test_a_second_hang_up_costs_no_checkpoint(tmp_path: Path) -> None:
    """A shell sends one when its terminal closes, and the system another when the shell has ended."""
    started = Started(tmp_path, tmp_path / "out.txt", steps=LONG)
    started.trains()
    for _ in range(20):
        os.kill(started.process.pid, signal.SIGHUP)
    assert started.ended() == 128 + signal.SIGHUP, started.said()
    done = read_card(started.run).steps_done
    assert RunFolder(started.run).checkpoints()[-1].name == f"step_{done:06d}"
    assert started.said() == []


def test_a_run_from_python_needs_no_console(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = open("/dev/full", "w")  # noqa: SIM115 - closing fails
    monkeypatch.setattr(sys, "stdout", stream)
    done = run(tiny_config(tmp_path / "data"), tmp_path / "run")
    monkeypatch.undo()
    assert done.card.notes == read_card(tmp_path / "run").notes
    assert_finished(tmp_path / "run", 12, "No space left on device")
    with contextlib.suppress(OSError):
        stream.close()
