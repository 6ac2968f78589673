"""Which runs may be averaged: those of one recipe that differ in nothing but the seed.

A recipe is a preset, its config diff, the steps, the data, the track and the kind of device. A run that cannot count
(damaged, unfinished, diverged, a seed that is there already) is left out by name and with the reason, because a mean
that is quietly taken over fewer runs than its reader thinks is worse than none.
"""

import hashlib
import json
import math
import statistics
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.core.errors import RunError
from paceline.metrics.card import LOSS_COLUMNS, SAME_EXPERIMENT, FieldChange, RunCard, read_card
from paceline.report.facts import setting

NOT_THE_RECIPE = (*SAME_EXPERIMENT, "steps", "track")
"""Fields, or starts of their names, that do not split groups; steps and track are compared by themselves."""


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    run: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Found:
    folder: Path
    card: RunCard


@dataclass(frozen=True, kw_only=True)
class Group:
    runs: tuple[Found, ...]
    """By seed; at least one, all finished with a finite loss."""

    @property
    def first(self) -> RunCard:
        return self.runs[0].card

    @property
    def losses(self) -> list[float]:
        return [final_loss(found.card) for found in self.runs]

    @property
    def seeds(self) -> list[int]:
        return [found.card.seed for found in self.runs]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.losses)

    @property
    def stdev(self) -> float | None:
        return statistics.stdev(self.losses) if len(self.runs) > 1 else None

    @property
    def key(self) -> str:
        return recipe_key(self.first)

    @property
    def recipe(self) -> str:
        """In words: the preset and what differs from it."""
        changed = [f"{change.field} {setting(change.after)}" for change in recipe_changes(self.first)]
        return ", ".join([self.first.preset, f"{self.first.steps:,} steps", *changed])


def final_loss(card: RunCard) -> float:
    assert card.val_loss is not None  # `why_not` has let it through
    return card.val_loss


def recipe_changes(card: RunCard) -> list[FieldChange]:
    return [change for change in card.diff if not change.field.startswith(NOT_THE_RECIPE)]


def recipe_key(card: RunCard) -> str:
    """Equal for runs of one recipe, and short."""
    changes = [[change.field, change.after] for change in recipe_changes(card)]
    parts = [card.preset, changes, card.steps, card.data_fingerprint, card.track, card.device]
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).hexdigest()


def read_cards(folders: Iterable[Path]) -> tuple[list[Found], list[LeftOut]]:
    """Every run whose card can be read, each folder once; and the others, with reasons."""
    found, damaged = [], []
    for folder in dict.fromkeys(folder.resolve() for folder in folders):
        try:
            found.append(Found(folder=folder, card=read_card(folder)))
        except RunError as error:
            damaged.append(LeftOut(run=folder.name, why=str(error)))
    return found, damaged


def that_count(runs: Iterable[Found]) -> tuple[list[Found], list[LeftOut]]:
    """Runs whose last loss can be averaged with others; and the others, with reasons."""
    judged = [(run, why_not(run.card)) for run in runs]
    left_out = [LeftOut(run=run.folder.name, why=why) for run, why in judged if why is not None]
    return [run for run, why in judged if why is None], left_out


def why_not(card: RunCard) -> str | None:
    """Why the card's loss cannot be averaged with others."""
    if not card.finished:
        return f"not finished: {card.steps_done:,} of {card.steps:,} steps; --resume it"
    if card.val_loss is None or not math.isfinite(card.val_loss):
        return "its last loss is not finite; it diverged, so the mean of the others flatters the recipe"
    if (last := validations(card).get(card.steps)) is None or last.loss != card.val_loss:
        return "its card contradicts itself: the last row of its losses is not its final loss"
    return None


@dataclass(frozen=True, kw_only=True)
class Validation:
    loss: float
    train_s: float


def validations(card: RunCard) -> dict[int, Validation]:
    """By step; those with a finite loss."""
    found = {}
    for row in card.losses:
        named = dict(zip(LOSS_COLUMNS, row, strict=False))
        step, loss, train_s = (_finite(named.get(name)) for name in ("step", "val_loss", "train_s"))
        if step is not None and loss is not None and train_s is not None:
            found[int(step)] = Validation(loss=loss, train_s=train_s)
    return found


def _finite(value: float | None) -> float | None:
    """JSON has no infinity, but 1e999 reads as one."""
    return value if value is not None and math.isfinite(value) else None


def grouped(
    runs: Sequence[Found], *, key: Callable[[RunCard], Hashable] = recipe_key
) -> tuple[list[Group], list[LeftOut]]:
    """Runs by recipe, in the order of first appearance; a second run of a seed is left out, since it is no new draw."""
    groups: dict[Hashable, dict[int, Found]] = {}
    left_out = []
    for found in runs:
        group = groups.setdefault(key(found.card), {})
        if (first := group.setdefault(found.card.seed, found)) is not found:
            why = f"repeats seed {found.card.seed} of {first.folder.name}, which is no new draw; use another seed"
            left_out.append(LeftOut(run=found.folder.name, why=why))
    return [Group(runs=tuple(group[seed] for seed in sorted(group))) for group in groups.values()], left_out


def hardware(card: RunCard) -> str:
    """1 × NVIDIA H200, or the processor's name."""
    if card.device == "cuda":
        return f"{card.ranks} × {card.environment.get('gpu', 'unknown GPU')}"
    return f"{card.environment.get('cpu', 'unknown CPU')}, {card.environment.get('cores', '?')} cores"


def code(card: RunCard) -> str:
    """The commit, with + where the checkout had changes; the version where there is none."""
    version = card.code_version
    return f"{version.commit[:10]}{'+' if version.dirty else ''}" if version.commit else version.version
