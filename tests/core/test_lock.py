"""A folder has one writer. The lock between real processes: refused while one lives, free however it ended."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.checkpoint.run_folder import only_writer
from paceline.core import lock
from paceline.core.errors import RunError

HOLDS = """
import os, subprocess, sys, time
from pathlib import Path
from paceline.checkpoint.run_folder import only_writer
with only_writer(Path(sys.argv[1])):
    {then}
    print("held", flush=True)
    sys.stdin.read()
"""


def holder(folder: Path, then: str = "pass") -> "subprocess.Popen[str]":
    """A process that holds the folder, after it did `then`, until its input ends."""
    words = [sys.executable, "-c", HOLDS.format(then=then), str(folder)]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_process_is_refused_until_the_first_has_ended(tmp_path: Path) -> None:
    first = holder(tmp_path)
    for _ in range(2):
        with pytest.raises(RunError, match="another process trains this run"), only_writer(tmp_path):
            pytest.fail("it was let in")
    first.communicate("")
    with only_writer(tmp_path), pytest.raises(RunError, match="another process"), only_writer(tmp_path):
        pytest.fail("it was let in")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "then",
    [
        "subprocess.Popen(['sleep', '20'], close_fds=False)",
        "r, w = os.pipe(); os.fork() or (os.write(w, b'.'), time.sleep(20), os._exit(0)); os.read(r, 1)",
    ],
)
def test_no_child_of_a_killed_run_keeps_it_locked(then: str, tmp_path: Path) -> None:
    first = holder(tmp_path, then)
    first.kill()
    first.wait()
    try:
        os.killpg(first.pid, 0)  # the child lives
        with only_writer(tmp_path):
            pass
    finally:
        os.killpg(first.pid, signal.SIGKILL)


def test_a_file_that_goes_with_its_holder_is_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The holder ends between another's opening of the file and its locking."""
    plain, ended = fcntl.flock, []

    def flock(handle: int, how: int) -> None:
        if not ended:
            ended.append((tmp_path / ".lock").unlink())
        plain(handle, how)

    monkeypatch.setattr(lock.fcntl, "flock", flock)
    with only_writer(tmp_path), pytest.raises(RunError, match="another process"), only_writer(tmp_path):
        pytest.fail("it was let in")


def test_where_there_are_no_locks_a_run_goes_on_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(lock.fcntl, "flock", unsupported)
    with only_writer(tmp_path), only_writer(tmp_path):
        pass
    monkeypatch.setattr(lock, "fcntl", None)
    with only_writer(tmp_path), only_writer(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []
