"""One process writes a folder: a run's, by its first rank, or that of data. No torch.

The lock is flock's, on a file of its own: a folder cannot be locked over NFS, which wants a file opened for writing. It
goes with the process, however that ends; neither commands that it starts nor forks keep it. Who ends well takes the
file away. Where the file system or the platform has no such lock, a second writer goes unnoticed.
"""

import contextlib
import functools
import os
from collections.abc import Iterator
from pathlib import Path

from paceline.core.errors import PacelineError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

LOCK_FILE = ".lock"

_held: set[int] = set()
"""Handles of the locks of this process."""


@contextlib.contextmanager
def only_writer(folder: Path, busy: PacelineError) -> Iterator[None]:
    """No other process, nor this one a second time, enters the same block for this folder meanwhile: `busy` is raised
    there."""
    handle = _locked(folder, busy)
    if handle is None:
        yield
        return
    _close_in_forks()
    _held.add(handle)
    try:
        yield
    finally:
        if handle in _held:  # not in a fork that came this way
            _held.remove(handle)
            _end(handle, folder)


def _end(handle: int, folder: Path) -> None:
    with contextlib.suppress(OSError):
        (folder / LOCK_FILE).unlink()
    os.close(handle)


def _locked(folder: Path, busy: PacelineError) -> int | None:
    """None: there can be no lock here. A folder that cannot be written is told by whoever writes next."""
    if fcntl is None:
        return None
    while True:
        try:
            handle = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError:
            return None
        if not _flock(handle, busy):
            _end(handle, folder)
            return None
        if _is_at(handle, folder / LOCK_FILE):
            return handle
        os.close(handle)  # the one that held it has ended, and its file with it


def _flock(handle: int, busy: PacelineError) -> bool:
    """False: the file system has no locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise busy from None
    except OSError:
        return False
    return True


def _is_at(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except OSError:
        return False


@functools.cache
def _close_in_forks() -> None:
    """From now on. A fork that outlives a killed run would keep it locked."""
    os.register_at_fork(after_in_child=_close_all)


def _close_all() -> None:
    while _held:
        os.close(_held.pop())
