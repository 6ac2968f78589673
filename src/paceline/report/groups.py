"""Runs that may be averaged: the same configuration, data and hardware, seeds apart."""

import functools
import json
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from paceline.metrics.card import SAME_EXPERIMENT
from paceline.report.curves import Column, Columns
from paceline.report.facts import setting
from paceline.report.runs import Run

SHOWN_CHANGES = 3
"""Settings that a group's label may name; the table of differences has all of them."""


@dataclass(frozen=True, eq=False)
class Group:
    label: str
    """Unique on the page."""
    runs: tuple[Run, ...]

    @property
    def judged(self) -> tuple[Run, ...]:
        """The runs that a mean is taken of: those that are finished and have a loss, the first of each seed. An
        unfinished one would lie too high, one that diverged has no number, and a seed's second run is no new sample."""
        well = [run for run in self.runs if run.card.finished and run.card.val_loss is not None]
        return tuple({run.card.seed: run for run in reversed(well)}.values())[::-1]

    @property
    def repeats(self) -> tuple[Run, ...]:
        """Further runs of a seed that counts already."""
        return tuple(
            run for run in self.runs if run.card.seed in self.seeds and run.card.finished and run not in self.judged
        )

    @property
    def losses(self) -> list[float]:
        """Last validation losses of the judged runs."""
        return [run.card.val_loss for run in self.judged if run.card.val_loss is not None]

    @property
    def seeds(self) -> list[int]:
        return [run.card.seed for run in self.judged]


@dataclass(frozen=True)
class Band:
    """Mean of a value over the runs of a group, and its lowest and highest, at the steps that all of them have."""

    at: Columns
    """Where: step, tokens, train_s, wall_s, each the mean of the runs."""
    mean: Column
    low: Column
    high: Column


def groups_of(runs: Sequence[Run]) -> list[Group]:
    """In the order of their first runs."""
    found: dict[Hashable, list[Run]] = {}
    for run in runs:
        found.setdefault(_key(run), []).append(run)
    members = list(found.values())
    taken: Counter[str] = Counter()
    groups = []
    for group, label in zip(members, _labels(members), strict=True):
        taken[label] += 1
        groups.append(Group(f"{label} ({taken[label]})" if taken[label] > 1 else label, tuple(group)))
    return groups


def compared_settings(run: Run) -> dict[str, str]:
    """The values that make the experiment, written out."""
    return {name: json.dumps(value) for name, value in run.config.items() if not name.startswith(SAME_EXPERIMENT)}


def _key(run: Run) -> Hashable:
    card = run.card
    return run.arm, card.preset, card.track, card.data_fingerprint, run.hardware, *compared_settings(run).items()


def _labels(members: Sequence[Sequence[Run]]) -> list[str]:
    """The arm, the name of a run that stands alone, or the preset with what sets the group apart from the others."""
    firsts = [group[0] for group in members]
    settings = [compared_settings(run) for run in firsts]
    names = dict.fromkeys(name for one in settings for name in one if name not in ("preset", "track"))
    differing = [name for name in names if len({one.get(name) for one in settings}) > 1]
    places = [(run.card.track or "no track", f"data {run.card.data_fingerprint[:8]}", run.hardware) for run in firsts]
    apart = [index for index, values in enumerate(zip(*places, strict=True)) if len(set(values)) > 1]
    labels = []
    for group, run, place in zip(members, firsts, places, strict=True):
        told = ", ".join([run.card.preset, *_changes(run, differing), *(place[index] for index in apart)])
        labels.append(run.arm or (run.label if len(group) == 1 else told))
    return labels


def _changes(run: Run, names: Sequence[str]) -> list[str]:
    """What the run has otherwise than its preset, among these fields."""
    changed = {change.field for change in run.card.diff}
    own = [f"{name.split('.')[-1]} {setting(run.config.get(name))}" for name in names if name in changed]
    more = [f"{len(own) - SHOWN_CHANGES} more"] if len(own) > SHOWN_CHANGES else []
    return own[:SHOWN_CHANGES] + more


def training_band(group: Group) -> Band | None:
    return _band([run.curves.steps | {"value": run.smooth_loss} for run in drawn_together(group)])


def validation_band(group: Group) -> Band | None:
    return _band([run.curves.evals | {"value": run.curves.evals["val_loss"]} for run in drawn_together(group)])


def rate(group: Group) -> Band | None:
    return _band([run.curves.steps | {"value": run.curves.steps["tokens_per_s"]} for run in drawn_together(group)])


def drawn_together(group: Group) -> Sequence[Run]:
    """The finished runs; while none is, all, as far as the slowest has come."""
    return group.judged or group.runs


def _band(curves: Sequence[Columns]) -> Band | None:
    """None of a single run, which is its own line."""
    if len(curves) < 2:
        return None
    common = functools.reduce(np.intersect1d, [curve["step"] for curve in curves])
    places = [np.searchsorted(curve["step"], common) for curve in curves]
    values = np.stack([curve["value"][place] for curve, place in zip(curves, places, strict=True)])
    at = {
        name: np.mean([curve[name][place] for curve, place in zip(curves, places, strict=True)], axis=0)
        for name in ("step", "tokens", "train_s", "wall_s")
    }
    return Band(at, values.mean(axis=0), values.min(axis=0), values.max(axis=0))
