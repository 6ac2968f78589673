"""Command lines from dataclasses, through tyro, with every mistake told in one line.

tyro answers a mistake with a box of several lines; here its text is caught and folded into the message of a UserError,
which `cli.main` prints and turns into exit code 2. An error raised while a config is built passes through unchanged.
"""

import contextlib
import io
import itertools
import re
import sys
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

import tyro

from paceline.core.errors import UserError
from paceline.core.output import unchanged

T = TypeVar("T")
ASKS_FOR_HELP = frozenset(("-h", "--help"))
Positional = Annotated[T, tyro.conf.Positional]
PresetName = Positional[Annotated[str, tyro.conf.arg(metavar="PRESET")]]
OptionalPreset = Positional[Annotated[str, tyro.conf.arg(metavar="[PRESET]")]]
OptionalRun = Positional[Annotated[str, tyro.conf.arg(metavar="[RUN]")]]
"""Positional arguments by what they name; optional are those with a default."""
Bare = Annotated[T, tyro.conf.arg(name="")]  # a nested dataclass whose flags carry no prefix
Repeated = Annotated[tuple[T, ...], tyro.conf.UseAppendAction]  # a flag that may be given several times
Hidden = Annotated[T, tyro.conf.Suppress, tyro.conf.Fixed]  # a field that is no flag


def parse(cls: type[T], argv: Sequence[str], *, verb: str, description: str, default: T | None = None) -> T:
    """`cls` from the arguments after the verb. --help prints and exits 0."""
    try:
        return _tyro(cls, argv, verb, description, default)
    except UserError:
        if "none" not in argv:
            raise
        return _tyro(cls, ["None" if word == "none" else word for word in argv], verb, description, default)


def _tyro(cls: type[T], argv: Sequence[str], verb: str, description: str, default: T | None) -> T:
    said = io.StringIO()
    options: dict[str, Any] = {} if default is None else {"default": default}
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(unchanged(sys.stdout)):  # help has colours
            parsed: T = tyro.cli(cls, args=list(argv), prog=f"paceline {verb}", description=description, **options)
            return parsed
    except SystemExit as end:
        if end.code in (0, None):
            sys.stdout.flush()
            raise
        raise UserError(f"paceline {verb}: {_fold(said.getvalue())}") from None


def _fold(box: str) -> str:
    """The first paragraph of tyro's box, and its nearest suggestion, as one line."""
    lines = [_unboxed(line) for line in re.sub(r"\x1b\[[0-9;]*m", "", box).splitlines()]
    body = list(itertools.dropwhile(lambda line: not line, lines[1:]))  # the first line is the frame's title
    first = " ".join(itertools.takewhile(bool, body))
    suggestion = next((line.split()[0] for line in body if line.startswith("--")), None)
    hint = f"; did you mean {suggestion}?" if "nrecognized" in first and suggestion else ""
    return (first or "wrong arguments") + hint + "; see --help"


def _unboxed(line: str) -> str:
    """The text inside a frame, which is drawn with + | - where the terminal has no better; a rule counts as empty."""
    inside = re.sub(r"^[│|╭╰+]|[│|╮╯+]$", "", line.strip()).strip()
    return "" if re.fullmatch(r"[─-]*", inside) else inside
