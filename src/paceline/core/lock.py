"""One process writes a folder: a run's, by its first rank, or that of data. No torch.

By flock on a file of its own, since NFS wants a file opened for writing. The lock goes with the process, however that
ends; neither forks keep it nor commands that it starts, but for those that are handed it. A process that ends well
removes the file. Where there are no locks, a second writer goes unnoticed.
"""

import contextlib
import functools
import os
import time
from collections.abc import Iterator
from pathlib import Path

from paceline.core.errors import PacelineError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

LOCK_FILE = ".lock"
PATIENCE_S = 10.0
BUSY = PacelineError("another process is in there")

_held: set[int] = set()  # handles of the locks of this process


@contextlib.contextmanager
def only_writer(folder: Path, busy: PacelineError, *, inherited: bool = False) -> Iterator[int | None]:
    """Raises `busy` where another process, or this one a second time, enters the block for the same folder. Gives the
    handle of the lock, which lasts as long as a command that has `inherited` it; None where there are no locks."""
    handle = _locked(folder / LOCK_FILE, busy)
    if handle is None:
        yield None
        return
    _close_in_forks()
    _held.add(handle)
    try:
        yield handle
    finally:
        if handle in _held:  # not in a fork that came this way
            _held.remove(handle)
            if inherited:
                os.close(handle)
            else:
                _end(handle, folder / LOCK_FILE)


@contextlib.contextmanager
def one_at_a_time(path: Path) -> Iterator[None]:
    """A short block that one process is in at a time, by this file; one that hangs is waited for `PATIENCE_S`."""
    until, handle = time.monotonic() + PATIENCE_S, None
    while time.monotonic() < until:
        try:
            handle = _locked(path, BUSY)
            break
        except PacelineError:
            time.sleep(0.005)
    try:
        yield
    finally:
        if handle is not None:
            _end(handle, path)


def _end(handle: int, path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
    os.close(handle)


def _locked(path: Path, busy: PacelineError) -> int | None:
    """None: there can be no lock here. The next write reports a folder that cannot be written."""
    while fcntl is not None:
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except OSError:
            return None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise busy from None
        except OSError:  # the file system has no locks
            _end(handle, path)
            return None
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(handle), os.stat(path)):
                return handle
        os.close(handle)  # the one that held it has ended, and its file with it
    return None


@functools.cache
def _close_in_forks() -> None:
    """From now on. A fork that outlives a killed run would keep it locked."""
    os.register_at_fork(after_in_child=_close_all)


def _close_all() -> None:
    while _held:
        os.close(_held.pop())
