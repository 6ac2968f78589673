"""Files that are either wholly there or not there at all, and their hashes."""

import contextlib
import errno
import hashlib
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from paceline.core.errors import RunError

HASH_CHUNK_BYTES = 1 << 20


@contextlib.contextmanager
def atomic_write(path: Path, *, mode: str = "wb") -> Iterator[IO[Any]]:
    """A file to write to that appears under `path` only when the block ends without an error: it is written beside it,
    flushed to the disk, then renamed. A crash leaves at most a `.tmp` file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)  # of a process that was killed, or a link that somebody has laid there
    try:
        with open(temporary, mode.replace("w", "x"), encoding=None if "b" in mode else "utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename in (None, str(temporary)):
            error.filename, error.filename2 = str(path), None  # a write that fails does not know its file
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make a rename inside `folder` survive a power cut. Where a folder cannot be opened (Windows), nothing to do."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def make_room(error: BaseException) -> str:
    """What to do first about a failed write, as a part of a sentence: something, if the disk or the quota is full."""
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    return "make room and " if full else ""


def write_json(path: Path, value: Any) -> None:
    with atomic_write(path, mode="w") as file:
        file.write(json.dumps(value, indent=1, allow_nan=False) + "\n")


def new_digest() -> "hashlib.blake2b":
    """What every file of ours is hashed with: 128 bits."""
    return hashlib.blake2b(digest_size=16)


def blake2b_of(path: Path) -> str:
    digest = new_digest()
    with open(path, "rb") as file:
        while chunk := file.read(HASH_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def is_plain_name(name: str) -> bool:
    """Whether a name that a file claims stays inside the folder it is joined to."""
    return name not in ("", ".", "..") and not set(name) & set("/\\:\0")


def check_links(folder: Path) -> None:
    """Raise RunError if something in a run's folder, or in its checkpoints, is a link that leads out of the folder or
    is no file at all: a folder from somebody else must not get anything outside it written, deleted or believed."""
    checkpoints = folder / "checkpoints"
    for place in (folder, checkpoints, *_inside(checkpoints)):
        for path in _inside(place):
            try:
                kind = path.lstat().st_mode
            except OSError:  # it was there for a moment
                continue
            if stat.S_ISLNK(kind):
                if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder)):
                    away = f"is a link out of the run's folder, to {os.readlink(path)}"
                    raise RunError(f"{path}: {away}; put what it leads to in its place, or remove it")
            elif not stat.S_ISREG(kind) and not stat.S_ISDIR(kind):
                raise RunError(f"{path}: is neither a file nor a folder; remove it")


def _inside(folder: Path) -> list[Path]:
    """Nothing, where there is no folder or it cannot be read."""
    with contextlib.suppress(OSError):
        return sorted(folder.iterdir())
    return []


def cache_folder() -> Path:
    """Where things that can be made again are kept: $PACELINE_CACHE_DIR, or `paceline` in the user's cache folder."""
    if named := os.environ.get("PACELINE_CACHE_DIR"):
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "paceline"


def read_cache(name: str) -> dict[str, Any]:
    """What `remember` has kept under this file name. A file that is missing or damaged remembers nothing."""
    try:
        known = json.loads((cache_folder() / name).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def remember(name: str, key: str, value: Any) -> None:
    """A cache that cannot be written costs a trial each time, nothing else."""
    with contextlib.suppress(OSError):
        write_json(cache_folder() / name, {**read_cache(name), key: value})
