"""The diff between two presets as parts that can be taken out and put in one by one. No torch.

A part is a technique that one of the two presets has and the other has not, with those of its fields that differ.
Which has it is asked of the presets at full size, whose values the techniques name, or of two configs of one preset
themselves; the values are those of the configs that are run. Techniques that share a field are one part, and so are
those that a config only accepts together. What no technique explains (a cool-down that follows the length of the run,
say) is one part called `rest`. A run's name, its length and how it is judged are no parts: arms are compared at equal
steps, by the same validations.
"""

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from paceline.core.errors import ConfigError, UserError
from paceline.core.schema import Change, changes, flatten
from paceline.lab.technique import Technique, is_in, techniques, with_values
from paceline.recipes.presets import preset
from paceline.settings.run import RunConfig

NEVER_A_PART = ("preset", "plugins", "steps", "seed", "track", "evaluate.", "checkpoint.", "metrics.", "bad_steps.")
"""Beginnings of fields that all arms share; the newer preset says how."""
REST = "rest"
COMPILED_ONLY = ("train.coordinate_descent", "train.skip_guards")

Switched = tuple[Technique, set[str]]  # a technique and those of its fields that differ


@dataclass(frozen=True)
class Part:
    key: str  # of its techniques; `no-KEY` for one that the diff takes away
    title: str
    before: Mapping[str, Any]  # field to its value in the predecessor
    after: Mapping[str, Any]
    came: tuple[Technique, ...] = ()
    went: tuple[Technique, ...] = ()

    def joined_with(self, other: "Part") -> "Part":
        return Part(
            key=f"{self.key}+{other.key}",
            title=f"{self.title}; {other.title}",
            before={**self.before, **other.before},
            after={**self.after, **other.after},
            came=self.came + other.came,
            went=self.went + other.went,
        )

    def without(self, full: RunConfig) -> RunConfig:
        """The newer config without this part. A ConfigError says why there is no such thing."""
        return _acting(with_values(full, self.before), self.went)

    def alone(self, base: RunConfig) -> RunConfig:
        return _acting(with_values(base, self.after), self.came)


def _acting(config: RunConfig, techniques: Iterable[Technique]) -> RunConfig:
    values = dict(flatten(config))
    for technique in techniques:
        for given in technique.given:
            if values[given.field] not in given.among:
                needs = " or ".join(map(str, given.among))
                raise ConfigError(f"{technique.key} has nothing to do where {given.field} is not {needs}")
    return config


def judged_alike(base: RunConfig, full: RunConfig) -> RunConfig:
    """The older config with what all arms share taken from the newer one."""
    shared = [c for c in changes(base, full) if c.field.startswith(NEVER_A_PART) and c.field != "preset"]
    return with_values(base, {change.field: change.after for change in shared})


def parts_of(base: RunConfig, full: RunConfig) -> list[Part]:
    """The diff from `base` to `full`, every field that differs in exactly one part."""
    one_preset = base.preset == full.preset
    before, after = (_techniques_of(config if one_preset else preset(config.preset)) for config in (base, full))
    differing = {c.field: c for c in changes(base, full) if not c.field.startswith(NEVER_A_PART)}
    switched = [
        (technique, fields)
        for technique in techniques().values()
        if (technique.key in before) != (technique.key in after)
        and (fields := {switch.field for switch in technique.switches} & set(differing))
    ]
    pieces = _connected(_largest(switched, after))
    pieces.append(([], set(differing).difference(*(fields for _, fields in pieces))))
    found = [
        _part(techniques, [change for name, change in differing.items() if name in fields], after)
        for techniques, fields in pieces
        if fields
    ]
    return _accepted_together(found, base, full)


@functools.cache
def _techniques_of(config: RunConfig) -> frozenset[str]:
    return frozenset(key for key, technique in techniques().items() if is_in(technique, config))


def _part(techniques: list[Technique], fields: list[Change], after: frozenset[str]) -> Part:
    came = tuple(technique for technique in techniques if technique.key in after)
    went = tuple(technique for technique in techniques if technique not in came)
    names = [technique.key for technique in came] + [f"no-{technique.key}" for technique in went]
    titles = [technique.title for technique in came] + [f"{technique.title}, dropped" for technique in went]
    return Part(
        key="+".join(names) or REST,
        title="; ".join(titles) or f"What no technique explains: {', '.join(change.field for change in fields)}",
        before={change.field: change.before for change in fields},
        after={change.field: change.after for change in fields},
        came=came,
        went=went,
    )


def _largest(found: list[Switched], after: frozenset[str]) -> list[Switched]:
    """Without techniques whose fields another one covers; of equals the one that came stays, not the one that went."""
    ordered = sorted(found, key=lambda one: (-len(one[1]), one[0].key not in after))
    kept: list[Switched] = []
    for technique, fields in ordered:
        if not any(fields <= others for _, others in kept):
            kept.append((technique, fields))
    return [one for one in found if one in kept]


def _connected(found: list[Switched]) -> list[tuple[list[Technique], set[str]]]:
    """Techniques that share a field, directly or through others, are one group, with the fields of all."""
    groups: list[tuple[list[Technique], set[str]]] = []
    for technique, fields in found:
        touching = [group for group in groups if fields & group[1]]
        members = [member for techniques, _ in touching for member in techniques]
        groups = [group for group in groups if group not in touching]
        groups.append(([*members, technique], fields.union(*(others for _, others in touching))))
    return groups


def _accepted_together(parts: list[Part], base: RunConfig, full: RunConfig) -> list[Part]:
    """Two parts of which each alone is refused and both together are not become one: under a tied head the rows of
    table and head are padded together or not at all."""
    for one, other in combinations(parts, 2):
        both = one.joined_with(other)
        if not _possible(one, base, full) and not _possible(other, base, full) and _possible(both, base, full):
            rest = [part for part in parts if part not in (one, other)]
            return _accepted_together([*rest, both], base, full)
    return parts


def _possible(part: Part, base: RunConfig, full: RunConfig) -> bool:
    try:
        part.without(full)
        part.alone(base)
    except ConfigError:
        return False
    return True


def picked(parts: list[Part], only: str | None) -> list[Part]:
    """Those named, by the part's name or by one of its techniques'."""
    if only is None:
        return parts
    names = [name.strip() for name in only.split(",") if name.strip()]
    for name in names:
        if not any(name in (part.key, *part.key.split("+")) for part in parts):
            raise UserError(f"--only {name}: no part of this diff; there are {', '.join(part.key for part in parts)}")
    return [part for part in parts if set(names) & {part.key, *part.key.split("+")}]


def idle(part: Part, config: RunConfig, *, device: str, ranks: int) -> str | None:
    """Why a part cannot show on this machine, as those of compiler, allocator and processes may; None: it can."""

    def waits(field: str) -> str | None:
        if field.startswith(COMPILED_ONLY) and not config.train.compile:
            return "acts on compiled code only, and these runs are not compiled"
        if field.startswith("parallel.") and ranks == 1:
            return "acts between processes only, and each of these runs is one"
        if field == "train.expandable_segments" and device != "cuda":
            return "acts on a GPU only"
        return None

    reasons = [waits(field) for field in part.after]
    return reasons[0] if reasons and all(reasons) else None
