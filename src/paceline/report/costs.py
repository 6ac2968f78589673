"""What a run cost: where its wall time went, by its card."""

import statistics

from paceline.report.groups import Group
from paceline.report.runs import Run

PARTS = ("launch to first step", "free first steps", "timed steps", "validation, saving, the rest")
"""Of the wall time, in this order. Compilation is in the free first steps."""

MOST_BARS = 30
"""Of a bar chart; the table has all."""


def wall_parts(group: Group) -> tuple[float | None, ...]:
    """Seconds of each of PARTS, mean over the finished runs; None where the cards do not say."""
    known = [parts for run in group.runs if (parts := _parts(run)) is not None]
    if not known:
        return (None,) * len(PARTS)
    return tuple(statistics.fmean(part) for part in zip(*known, strict=True))


def _parts(run: Run) -> tuple[float, float, float, float] | None:
    card = run.card
    if not card.finished or card.wall_s is None or card.train_s is None:
        return None
    start_s, first_s = card.startup_s or 0.0, card.first_steps_s or 0.0
    return start_s, first_s, card.train_s, max(0.0, card.wall_s - card.train_s - start_s - first_s)


def step_seconds(run: Run) -> float | None:
    """Mean over the timed steps."""
    card = run.card
    if not run.is_timed or not card.tokens_per_s or not card.steps_done:
        return None
    return card.tokens / card.steps_done / card.tokens_per_s
