"""Errors that reach the user. The command line prints `str(error)` as one line and exits with `exit_code`.

Any other exception is a bug of ours and keeps its traceback, but for what the system says of a file: `naming_files`.
"""

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any


class PacelineError(Exception):
    """One line for the user. Raised itself for a failure that is not the user's doing (a full disk, a lost rank)."""

    exit_code = 1
    told: bool | None = None
    """Of several processes: whether another one prints this line. None: not settled, so it is printed."""


class UserError(PacelineError):
    """A mistake the user can mend. The message gives the value, the reason and what to do."""

    exit_code = 2


class ConfigError(UserError):
    """A configuration that cannot work; the message names the flag to change."""


class DataError(UserError):
    """A file or stream of data that is not what it should be; the message names file and place."""


class RunError(UserError):
    """A run folder that is missing, unfinished or damaged."""


@contextlib.contextmanager
def naming_files() -> Iterator[None]:
    """An OSError that knows its file leaves the block as one line. Without one it may be anything, and stays itself."""
    try:
        yield
    except OSError as error:
        if error.filename is None or error.strerror is None:  # errors of urllib have a name only
            raise
        raise PacelineError(f"{error.filename}: cannot be read or written ({error.strerror})") from error


def optional_module(name: str, missing: PacelineError) -> Any:
    """A module of a package that may not be installed; then `missing` is raised, which says what to install."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise missing from None
