"""Limits of single settings, stated beside their fields: `every: Annotated[int | None, at_least(1)] = None`.

An error names the flag, its value and the limit, and may say what to use instead. No torch.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, get_type_hints

from paceline.core.errors import ConfigError


@dataclass(frozen=True)
class Limit:
    words: str
    holds: Callable[[Any], bool]

    def saying(self, cure: str) -> "Limit":
        return replace(self, words=f"{self.words}; {cure}")


def at_least(least: int, most: float = math.inf) -> Limit:
    ends = "" if most == math.inf else f" and at most {most:,}"
    return Limit(f"must be at least {least}{ends}", lambda value: least <= value <= most)


def inside(low: int, high: int) -> Limit:
    return Limit(f"is outside [{low}, {high}]", lambda value: low <= value <= high)


FINITE = Limit("must be a finite number", math.isfinite)
NOT_NEGATIVE = Limit("must be a number of at least 0", lambda value: 0 <= value < math.inf)
POSITIVE = Limit("must be positive", lambda value: value > 0)
UP_TO_A_YEAR = Limit("must be positive and at most a year, 31,536,000", lambda seconds: 0 < seconds <= 31_536_000)
POSITIVE_FINITE = Limit("must be positive and finite", lambda value: 0 < value < math.inf)
ANY = Limit("must be a finite number, and a whole one within 64 bits", lambda value: not _absurd(value))
"""Holds for every field."""
POSITIONS = Limit("must be positive and at most 4,194,304", lambda count: 0 < count <= 1 << 22)
TOKENS = Limit("is beyond 2^30 tokens", lambda tokens: abs(tokens) <= 1 << 30)
UNIT_INTERVAL, PORT = inside(0, 1), inside(0, 65_535)
SHARE = Limit("is outside (0, 1]", lambda value: 0 < value <= 1)
BELOW_1 = Limit("is outside [0, 1)", lambda value: 0 <= value < 1)


class Limited:
    """A dataclass whose fields keep the limits in their annotations; None, which leaves a setting out, passes."""

    prefix: ClassVar[str]
    """What stands before a field's name in an error, such as --optim.muon."""

    def __init_subclass__(cls, prefix: str | None = None) -> None:
        if prefix is not None:
            cls.prefix = prefix

    def __post_init__(self) -> None:
        kind: type = type(self)
        limits = _limits(kind)
        for name in (field.name for field in fields(kind)):
            value, limit = getattr(self, name), limits.get(name, ANY)
            if value is not None and not (ANY.holds(value) and limit.holds(value)):
                field = name.replace("_", "-") if self.prefix.startswith("--") else name
                raise ConfigError(f"{self.prefix}{field} {value!s:.60}{self.of()} {limit.words}")
        self.check()

    def check(self) -> None:
        """Raise ConfigError for what concerns several fields."""

    def of(self) -> str:
        """What follows the value in an error, where the prefix does not say whose it is."""
        return ""


def _absurd(value: Any) -> bool:
    """A number that no file of ours, or no tensor, can hold."""
    if isinstance(value, tuple):
        return any(map(_absurd, value))
    return (type(value) is float and not math.isfinite(value)) or (type(value) is int and abs(value) >= 2**63)


@functools.cache
def _limits(cls: type) -> dict[str, Limit]:
    marks = {name: getattr(hint, "__metadata__", ()) for name, hint in get_type_hints(cls, include_extras=True).items()}
    return {name: mark for name, found in marks.items() for mark in found if isinstance(mark, Limit)}
