"""Techniques: a name, the switches that turn one on, and where it has something to do. No torch.

`techniques.toml` lists them by topic. A technique is in a config when every `given` holds and every switch has an
on-value, so the presets that have it are computed. What each is, its code, tests and cost are in docs/techniques.
"""

import difflib
import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from paceline.core.errors import ConfigError, UserError
from paceline.core.migrations import leaves
from paceline.core.schema import flatten, from_dict, plain, to_dict
from paceline.recipes.presets import preset
from paceline.recipes.records import PUBLIC
from paceline.settings.run import RunConfig

Value = bool | int | float | str | tuple[int, ...] | None


@dataclass(frozen=True, kw_only=True)
class Switch:
    """A dotted field of RunConfig, with the value that means on and the one that means off."""

    field: str
    on: Value = None
    off: Value = None
    also_on: tuple[Value, ...] = ()  # other values under which the technique is there too


@dataclass(frozen=True, kw_only=True)
class Given:
    """A setting without which the technique has nothing to do."""

    field: str
    among: tuple[Value, ...]


@dataclass(frozen=True, kw_only=True)
class Technique:
    key: str
    topic: str
    title: str
    record: int | None = None  # that brought it; None if no record has it or the public logs do not say
    switches: tuple[Switch, ...] = ()
    given: tuple[Given, ...] = ()
    records: tuple[int, ...] = ()  # first and last record of a change that only the original scripts made

    @functools.cached_property
    def presets(self) -> tuple[str, ...]:
        if self.records:
            first, last = self.records
            return tuple(name for name, public in PUBLIC.items() if first <= public.record <= last)
        return tuple(name for name in PUBLIC if is_in(self, preset(name)))


@functools.cache
def techniques() -> dict[str, Technique]:
    """All by key, in the order of the file."""
    topics = tomllib.loads(resources.files("paceline.lab").joinpath("techniques.toml").read_text(encoding="utf-8"))
    return {
        key: from_dict(Technique, {"key": key, "topic": topic, **_with_switches(key, row)}, at=key)
        for topic, group in topics.items()
        for key, row in group.items()
    }


def _with_switches(key: str, row: dict[str, Any]) -> dict[str, Any]:
    """A row of the file with its settings as switches and conditions."""
    switches: dict[str, dict[str, Any]] = {}
    for name, value in leaves({part: fields for part, fields in row.items() if part != "given"}):
        field, _, state = name.rpartition(".")
        if state in ("on", "off", "also_on"):
            switches.setdefault(field, {"field": field})[state] = value
        elif field:
            if not isinstance(value, list) or len(value) < 2:
                raise ConfigError(f"{key}.{name}: expected [off, on], got {value!r}")
            switches[name] = {"field": name, "off": value[0], "on": value[1], "also_on": value[2:]}
    plain = {name: value for name, value in row.items() if not isinstance(value, dict)}
    given = [{"field": name, "among": among} for name, among in leaves(row.get("given", {}))]
    return {**plain, "switches": list(switches.values()), "given": given}


def technique(key: str) -> Technique:
    if key not in techniques():
        near = difflib.get_close_matches(key, techniques(), n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}?" if near else "docs/techniques/index.md lists them"
        raise UserError(f"technique {key!r} does not exist; {hint}")
    return techniques()[key]


def is_in(technique: Technique, config: RunConfig) -> bool:
    values = dict(flatten(config))
    holds = all(values[given.field] in given.among for given in technique.given)
    return holds and all(values[switch.field] in (switch.on, *switch.also_on) for switch in technique.switches)


def with_values(config: RunConfig, values: Mapping[str, Any]) -> RunConfig:
    """The config with these dotted fields set; types and combinations are checked as when a file is read."""
    whole = to_dict(config)
    for name, value in values.items():
        *path, leaf = name.split(".")
        part = whole
        for step in path:
            part = part[step]
        part[leaf] = plain(value)
    return from_dict(RunConfig, whole)


def flag_words(field: str, value: Any) -> list[str]:
    """A field and its value as a program passes them to `paceline train`."""
    *path, leaf = field.replace("_", "-").split(".")
    if isinstance(value, bool):
        return ["--" + ".".join([*path, leaf if value else f"no-{leaf}"])]
    values = value if isinstance(value, tuple) else (value,)
    return ["--" + ".".join([*path, leaf]), *map(str, values)]
