"""What a technique is: a name, its switches, and where to find its reason, its code, its proof and its price. No torch.

A technique is in a config when every `given` holds and every switch has an on-value. The tables in `table/` say in
which record presets that is so, and a test compares them with the presets, so the two cannot drift apart. A technique
without switches is always there; `given` then says where it has something to do.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.core.schema import flatten, from_dict, to_dict
from paceline.recipes.records import PUBLIC
from paceline.train.config import RunConfig

NEWEST = "r18-softcap"
"""Where a technique that no record has is shown."""


@dataclass(frozen=True)
class Switch:
    """A dotted field of RunConfig, with the value that means on and the one that means off."""

    field: str
    on: Any
    off: Any
    also_on: tuple[Any, ...] = ()
    """Other values under which the technique is there too."""


@dataclass(frozen=True)
class Given:
    """A setting without which the technique has nothing to do."""

    field: str
    among: tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One number that we measured, with its interval and the place where it can be looked up."""

    what: str
    """Quantity and unit; of a difference, with the technique minus without it."""
    value: float
    low: float | None = None
    high: float | None = None
    """Ends of the 95 % interval; None: a single run."""
    n: int
    """Runs, or pairs of runs."""
    file: str
    """Under benchmarks/results."""
    at: str
    """Path inside the file: `effects/softcap-15/leave-one-out/loss` (`results.looked_up`)."""

    def __str__(self) -> str:
        interval = "" if self.low is None or self.high is None else f"95 %: {self.low:g} to {self.high:g}, "
        return f"{self.what} {self.value:g} ({interval}n = {self.n})"


@dataclass(frozen=True, kw_only=True)
class Measurement:
    said: str
    """What we measured. In a technique's, `{0[val_loss]:.4f}` stands for a value of the first file; a claim is also
    shown where there are no files, and has its numbers written out."""
    files: tuple[str, ...] = ()
    """Under benchmarks/results; those of the figures need not be named again."""
    figures: tuple[Figure, ...] = ()
    indicative: str | None = None
    """What it was measured on, if that is too small or too slow to settle anything about the full size."""

    @property
    def sources(self) -> tuple[str, ...]:
        """Every file it draws on."""
        return tuple(dict.fromkeys((*self.files, *(figure.file for figure in self.figures))))

    def in_words(self, said: str) -> str:
        """`said`, which may have its numbers filled in, with the figures and how far they reach."""
        figures = f"{'; '.join(map(str, self.figures))}." if self.figures else ""
        mark = f"Indicative only: {self.indicative}." if self.indicative else ""
        return " ".join(part for part in (said, figures, mark) if part)


@dataclass(frozen=True, kw_only=True)
class Technique:
    key: str
    title: str
    what: str
    formula: str | None = None
    record: int | None = None
    """The record that brought it; None if no record has it or the public logs do not tell which one did."""
    presets: tuple[str, ...]
    """The record presets that have it."""
    switches: tuple[Switch, ...] = ()
    given: tuple[Given, ...] = ()
    code: tuple[str, ...]
    """`file:symbol`, the file under src/paceline."""
    tests: tuple[str, ...]
    """`file::test`, the file under tests."""
    public: str
    """What the public logs say it bought, or that none of them isolates it."""
    cost: str
    measurements: tuple[Measurement, ...] = ()

    @property
    def shown_on(self) -> str:
        """The preset on which commands show the technique: the newest that has it."""
        return self.presets[-1] if self.presets else NEWEST


def records(first: int, last: int) -> tuple[str, ...]:
    """The presets of all records from one number to another."""
    return tuple(name for name, result in PUBLIC.items() if first <= result.record <= last)


def is_in(technique: Technique, config: RunConfig) -> bool:
    values = dict(flatten(config))
    return all(values[given.field] in given.among for given in technique.given) and all(
        values[switch.field] in (switch.on, *switch.also_on) for switch in technique.switches
    )


def switched_off(technique: Technique, config: RunConfig) -> RunConfig:
    """The config without the technique, and otherwise as it was."""
    return with_values(config, {switch.field: switch.off for switch in technique.switches})


def switched_on(technique: Technique, config: RunConfig) -> RunConfig:
    return with_values(config, {switch.field: switch.on for switch in technique.switches})


def with_values(config: RunConfig, values: Mapping[str, Any]) -> RunConfig:
    """The config with these dotted fields set; types and combinations are checked as when a file is read."""
    whole = to_dict(config)
    for name, value in values.items():
        *path, leaf = name.split(".")
        part = whole
        for step in path:
            part = part[step]
        part[leaf] = value
    return from_dict(RunConfig, whole)


def command(technique: Technique) -> str | None:
    """The command that trains a record without the technique, or with it where no record has it. None: no switch."""
    if not technique.switches:
        return None
    flags = [flag(switch.field, switch.off if technique.presets else switch.on) for switch in technique.switches]
    return " ".join(["paceline train", technique.shown_on, *flags])


def flag(field: str, value: Any) -> str:
    """A field and its value as a person types them for `paceline train`."""
    return " ".join(flag_words(field, value))


def flag_words(field: str, value: Any) -> list[str]:
    """The same as a program passes them."""
    *path, leaf = field.replace("_", "-").split(".")
    if isinstance(value, bool):
        return ["--" + ".".join([*path, leaf if value else f"no-{leaf}"])]
    values = value if isinstance(value, tuple) else (value,)
    return ["--" + ".".join([*path, leaf]), *map(str, values)]
