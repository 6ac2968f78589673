"""One run of an ablation as a process of its own: started, asked to stop, ended.

A child has a session of its own, so that Ctrl-C reaches it through us alone and once: it then saves and ends well. It
inherits the lock of the ablation's folder and so keeps it if we are killed; nobody starts a second process in the same
run folder while it lives.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from paceline.core.errors import UserError

try:
    import fcntl
except ImportError:  # Windows: no lock
    fcntl = None  # type: ignore[assignment]

LOCK_FILE = ".lock"


class Child(Protocol):
    def poll(self) -> int | None:
        """The exit code, or None while it runs."""

    def ask_to_stop(self) -> None:
        """It should save and end."""

    def kill(self) -> None:
        """It must end now."""


class Launch(Protocol):
    def __call__(self, words: Sequence[str], log: Path, place: int) -> Child:
        """Start `paceline train` with these words; what it says goes to `log`. `place`: which of the jobs it is."""


class LocalChild:
    def __init__(self, process: subprocess.Popen) -> None:
        self.process = process

    def poll(self) -> int | None:
        return self.process.poll()

    def ask_to_stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # a compiler's workers, too
        self.process.wait()


def local_launch(*, gpus: Sequence[str], threads: int | None, lock: int | None) -> Launch:
    """Starts runs on this machine: the one at place i sees `gpus[i]` alone, if there are any. `threads` is how many a
    run may use on a CPU that it shares with others; None: as many as it likes."""

    def launch(words: Sequence[str], log: Path, place: int) -> Child:
        more = {"CUDA_VISIBLE_DEVICES": gpus[place]} if gpus else {}
        if threads is not None:
            more["OMP_NUM_THREADS"] = str(threads)
        with open(log, "ab") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "paceline.cli", "train", *words],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **more},
                start_new_session=True,
                pass_fds=() if lock is None else (lock,),
            )
        return LocalChild(process)

    return launch


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[int | None]:
    """Nobody else works in this folder while the block runs, nor while a child lives that inherited the lock."""
    folder.mkdir(parents=True, exist_ok=True)
    if fcntl is None:
        yield None
        return
    with open(folder / LOCK_FILE, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(
                f"--out {folder}: another command, or a run that it started, is at work there; wait until it has ended"
            ) from None
        yield file.fileno()
