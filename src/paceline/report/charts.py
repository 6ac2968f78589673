"""The numbers behind the page's charts, as JSON for its script. How they are drawn is in assets/report.js."""

import json
from collections.abc import Sequence
from typing import Any

from paceline.metrics.records import EvalRecord, StepRecord
from paceline.report.runs import Run, smoothed

MAX_POINTS = 2_000
"""Points of one line: more than a screen is wide, and a page of ten long runs still opens at once."""


def chart_data(runs: Sequence[Run]) -> str:
    """All runs as JSON that may stand inside a script element: `<` is written as an escape."""
    text = json.dumps({"runs": [_run(run) for run in runs]}, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _run(run: Run) -> dict[str, Any]:
    mean = smoothed([record.train_loss for record in run.steps])
    stride = max(1, -(-len(run.steps) // MAX_POINTS))
    kept = list(range(len(run.steps) - 1, -1, -stride))[::-1]  # counted from the end: the last step is always shown
    steps = [run.steps[index] for index in kept]
    return {
        "label": run.label,
        "x": _positions(steps),
        "loss": _rounded([record.train_loss for record in steps]),
        "smooth": _rounded([mean[index] for index in kept]),
        "lr": _rounded([record.lr_scale for record in steps]),
        "window": [record.window_tokens for record in steps],
        "rate": _rounded([record.tokens_per_s for record in steps]),
        "val": {"x": _positions(run.evals), "loss": _rounded([record.val_loss for record in run.evals])},
    }


def _positions(records: Sequence[StepRecord] | Sequence[EvalRecord]) -> dict[str, list[Any]]:
    """Where each record lies on each of the four axes; on the train clock, nowhere before that clock starts."""
    return {
        "step": [record.step for record in records],
        "tokens": [record.tokens for record in records],
        "train": _rounded([record.train_s or None for record in records]),
        "wall": _rounded([record.wall_s for record in records]),
    }


def _rounded(values: Sequence[float | None]) -> list[float | None]:
    return [None if value is None else float(f"{value:.6g}") for value in values]
