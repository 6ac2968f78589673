"""Ranks that cannot begin together: each case ends soon, in one line of the first rank, and never in a hang.

Real processes without torchrun, as a cluster starts them: torchrun's own store is met in test_lost_rank.py."""

import shutil
import signal
import socket
import subprocess
from pathlib import Path

import pytest

import paceline
from paceline.core.environment import code_digest
from parallel.launch import flags, free_port, one_rank, wait_for_checkpoint

ENDS_S = 60
PATIENCE = ["--parallel.start-timeout-s", "3", "--parallel.timeout-s", "3"]
SLOW_START = ["--parallel.start-timeout-s", "60", "--parallel.timeout-s", "3"]
"""For ranks that all come, on however busy a machine."""


def command(folder: Path, run: str) -> list[object]:
    return ["train", "demo", "--steps", "4000", "--no-finish", "--out", folder / run, *flags(folder)]


def ended(*processes: subprocess.Popen[str]) -> list[tuple[int, list[str]]]:
    """Exit code and our own lines of each, in order."""
    said = [process.communicate(timeout=ENDS_S)[0] for process in processes]
    lines = [[line for line in text.splitlines() if line.startswith("paceline: ")] for text in said]
    return [(process.returncode, own) for process, own in zip(processes, lines, strict=True)]


@pytest.mark.journey
def test_a_missing_rank_a_port_in_use_and_other_flags_end_in_one_line(tmp_path: Path) -> None:
    """At the same time: a process takes seconds to start."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        in_use, port = taken.getsockname()[1], free_port()
        lonely = one_rank(0, 4, free_port(), *command(tmp_path, "lonely"), *PATIENCE)
        shut_out = one_rank(0, 2, in_use, *command(tmp_path, "shut-out"), *PATIENCE)
        first = one_rank(0, 2, port, *command(tmp_path, "unequal"), *SLOW_START)
        second = one_rank(1, 2, port, *command(tmp_path, "unequal"), *SLOW_START, "--model.mlp-ratio", "2")
        ends = ended(lonely, shut_out, first, second)
    line = "paceline: rank 1, 2, 3 of 4 did not come within 3 s (--parallel.start-timeout-s)"
    assert ends[0] == (1, [line])
    line = f"paceline: port {in_use} of 127.0.0.1 cannot be opened (it is in use); choose a free one by MASTER_PORT"
    assert ends[1] == (1, [line])
    line = "rank 1 differs from rank 0: --model.mlp_ratio is 2 there and 4 here; all ranks need the same code and flags"
    assert ends[2:] == [(2, [f"paceline: {line}"]), (2, [])]


@pytest.mark.slow
def test_ranks_with_different_code_do_not_begin(tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(Path(paceline.__file__).parent, other / "paceline")
    (other / "paceline" / "cli.py").open("a").write("# another version\n")
    port = free_port()
    first = one_rank(0, 2, port, *command(tmp_path, "run"), *SLOW_START)
    second = one_rank(1, 2, port, *command(tmp_path, "run"), *SLOW_START, package=other)
    (code, lines), silent = ended(first, second)
    assert code == 2
    assert len(lines) == 1
    assert lines[0].startswith("paceline: rank 1 differs from rank 0: the code's digest is ")
    assert f"and {code_digest()} here" in lines[0]
    assert silent == (2, [])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (signal.SIGKILL, "onnection"),  # reset or closed, as it happens
        (signal.SIGSTOP, "it was silent for 3 s, --parallel.timeout-s"),  # as a machine that is cut off
    ],
)
def test_a_rank_that_disappears_ends_the_run_within_the_time_out(
    number: signal.Signals, reason: str, tmp_path: Path
) -> None:
    port = free_port()
    first, second = (one_rank(rank, 2, port, *command(tmp_path, "run"), *SLOW_START) for rank in range(2))
    wait_for_checkpoint(tmp_path / "run", first)
    second.send_signal(number)
    [(code, lines)] = ended(first)
    second.kill()
    second.communicate()
    assert code == 1
    assert len(lines) == 1
    assert lines[0].startswith("paceline: rank 0 of 2 lost another rank (")
    assert reason in lines[0]
    assert lines[0].endswith("what was saved goes on with --resume")


@pytest.mark.slow
def test_a_mistake_of_one_rank_is_told_by_the_first(tmp_path: Path) -> None:
    """Only the second one finds no data, after both have met; each says its own."""
    port = free_port()
    first = one_rank(0, 2, port, *command(tmp_path, "run"), *SLOW_START)
    second = one_rank(1, 2, port, *command(tmp_path, "run"), *SLOW_START, "--data.dir", tmp_path / "nowhere")
    (code, lines), (other_code, other_lines) = ended(first, second)
    assert (code, other_code) == (1, 2)
    assert len(lines) == len(other_lines) == 1
    assert other_lines[0].startswith("paceline: rank 1: ")
    assert "; rank 1: " in lines[0]
    assert "nowhere: not a folder" in lines[0]
