"""What a run is, in a line: its preset, its scale, its seed, and the first settings that are not the preset's.

A card does not keep the scale, which is no setting but a rule that changes a dozen of them. It is recognised by what
the rule leaves, and not told where two scales leave the same. What scale and steps explain is not listed again.
"""

from collections.abc import Sequence

from paceline.metrics.card import FieldChange, RunCard, card_diff
from paceline.recipes.presets import PRESETS
from paceline.recipes.scaling import scaled, with_steps
from paceline.report.facts import setting
from paceline.report.words import some
from paceline.train.config import RunConfig

SMALLEST = 64
"""Scales from 1/2 to one over this are recognised."""


def recipe(card: RunCard) -> str:
    """preset demo, scale 1/2, seed 0, steps 60, optim.matrices adamw"""
    over, explained = _explained(card)
    scale = [f"scale 1/{over}"] if over else []
    track = [f"track {card.track}"] if card.track else []
    own = [change for change in card.diff if change.field != "seed" and change not in explained]
    changes = [some([f"{change.field} {setting(change.after)}" for change in own])] if own else []
    return ", ".join([f"preset {card.preset}", *scale, *track, f"seed {card.seed}", *changes])


def _explained(card: RunCard) -> tuple[int | None, Sequence[FieldChange]]:
    """One over the scale, and the changes that scale and steps bring about."""
    if card.preset not in PRESETS or card.steps < 1:
        return None, ()
    base = PRESETS[card.preset]()
    over = _one_over_scale(base, card)
    smaller = base if over is None else scaled(base, 1 / over)
    brought = card_diff(base, with_steps(smaller, card.steps))
    return over, [change for change in brought if change.field != "steps" or smaller.steps == card.steps]


def _one_over_scale(base: RunConfig, card: RunCard) -> int | None:
    """If the run's shapes are those of one scale only; where they are those of several, with the steps."""
    if all(change.field != "model.head_dim" for change in card.diff):
        return None
    alike = [over for over in range(2, SMALLEST + 1) if _has_shapes_of(scaled(base, 1 / over), base, card)]
    if len(alike) > 1:
        alike = [over for over in alike if scaled(base, 1 / over).steps == card.steps]
    return alike[0] if len(alike) == 1 else None


def _has_shapes_of(smaller: RunConfig, base: RunConfig, card: RunCard) -> bool:
    shapes = [change for change in card_diff(base, smaller) if change.field.startswith(("model.", "batch."))]
    return all(change in card.diff for change in shapes)
