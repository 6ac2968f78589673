"""What commands share: a result for a program or a person, and progress lines where there is no terminal."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paceline.core.output import tell

LINE_EVERY_S = 10.0  # between two lines of progress where there is no terminal


@dataclass(frozen=True, kw_only=True)
class JsonArgs:
    json: bool = False
    """For programs."""


def answer(values: Any, show: Callable[[], object], *, as_json: bool) -> int:
    """Print `values` as JSON, or call `show`, which prints them for a person. Returns exit code 0."""
    if as_json:
        print(json.dumps(values, indent=1))
    else:
        show()
    return 0


def say(line: str) -> None:
    """For a person who waits; standard output is the result's alone."""
    tell(line, sys.stderr)
