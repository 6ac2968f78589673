"""The numbers behind the page's charts, as JSON for its script. How they are drawn is in assets/report.js."""

import functools
import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

from paceline.core.schema import to_dict
from paceline.report.ablation import Ablation
from paceline.report.costs import MOST_BARS, PARTS, wall_parts
from paceline.report.curves import MEMORY_FIELD, Column, Columns
from paceline.report.groups import Band, Group, drawn_together, rate, training_band, validation_band
from paceline.report.runs import Run
from paceline.report.subject import Subject
from paceline.report.thinning import kept

MOST_POINTS = 1_500
"""Of one line: more than a screen is wide."""
ALL_POINTS = 40_000
"""Of all loss curves together, so that a page of 200 runs stays small and is drawn in seconds."""
FEWEST_POINTS = 100
SMALL_CHART_POINTS = (10_000, 300, 50)
"""The same three for the small charts: of all lines, of one at most, of one at least."""
RAW_RUNS = 6
"""With more runs than this the loss of every single step would be a cloud, and is left out."""
AXES = {"step": "step", "tokens": "tokens", "train": "train_s", "wall": "wall_s"}


def chart_data(subject: Subject) -> dict[str, Any]:
    """All that the script draws."""
    points = loss_points(len(subject.runs))
    group_of = {id(run): number for number, group in enumerate(subject.groups) for run in group.runs}
    in_mean = {id(run) for group in subject.groups for run in drawn_together(group)}
    raw = len(subject.runs) <= RAW_RUNS
    return {
        "runs": [
            {
                "label": run.label,
                "group": group_of[id(run)],
                "in_mean": id(run) in in_mean,
                **_curves(run, points, raw),
            }
            for run in subject.runs
        ],
        "groups": [_group(group, points, len(subject.groups)) for group in subject.groups],
        "parts": list(PARTS),
        "most_bars": MOST_BARS,
        "benches": [{"label": bench.label, "s": bench.profiled_s, "shares": bench.shares} for bench in subject.benches],
        "ablations": [_ablation(ablation) for ablation in subject.ablations],
    }


def as_script(data: dict[str, Any]) -> str:
    """JSON that may stand inside a script element: `<` is written as an escape."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def loss_points(lines: int) -> int:
    """Points of each of so many loss curves."""
    return max(FEWEST_POINTS, min(MOST_POINTS, ALL_POINTS // max(1, lines)))


@functools.lru_cache(maxsize=64)
def _curves(run: Run, points: int, raw: bool) -> dict[str, Any]:
    """Kept for the live page, where of many runs one or two have changed since the last look."""
    steps, evals = run.curves.steps, run.curves.evals
    chosen = kept(steps["train_loss"] if raw else run.smooth_loss, points)
    return {
        "x": _positions({name: steps[name][chosen] for name in AXES.values()}),
        "smooth": _rounded(run.smooth_loss[chosen]),
        "loss": _rounded(steps["train_loss"][chosen]) if raw else None,
        "val": {"x": _positions(evals), "loss": _rounded(evals["val_loss"])},
    }


def _group(group: Group, points: int, num_groups: int) -> dict[str, Any]:
    return {
        "label": group.label,
        "n": len(group.runs),
        "mean": _line(training_band(group), points),
        "val": _line(validation_band(group), points),
        "schedule": _schedule(group, num_groups),
        "wall": [_sized(part) for part in wall_parts(group)],
        "peak": max((run.card.peak_bytes for run in group.runs if run.card.peak_bytes is not None), default=None),
    }


def _line(band: Band | None, points: int) -> dict[str, Any] | None:
    if band is None:
        return None
    chosen = kept(band.mean, points)
    return {
        "x": _positions({name: band.at[name][chosen] for name in AXES.values()}),
        "mean": _rounded(band.mean[chosen]),
        "low": _rounded(band.low[chosen]),
        "high": _rounded(band.high[chosen]),
    }


def _schedule(group: Group, num_groups: int) -> dict[str, Any]:
    """The first run's schedule, which is that of all, and the speed: the mean over runs."""
    all_points, most, fewest = SMALL_CHART_POINTS
    points = max(fewest, min(most, all_points // num_groups))
    steps, mean_rate = group.runs[0].curves.steps, rate(group)
    speed = (steps["step"], steps["tokens_per_s"]) if mean_rate is None else (mean_rate.at["step"], mean_rate.mean)
    return {
        "lr": _small(steps["step"], steps["lr_scale"], points),
        "window": _small(steps["step"], steps["window_tokens"], points),
        "rate": _small(*speed, points),
        "allocated": _small(steps["step"], steps[MEMORY_FIELD] / 2**30, points),
    }


def _small(x: Column, y: Column, points: int) -> dict[str, Any]:
    chosen = kept(y, points)
    return {"x": _rounded(x[chosen]), "y": _rounded(y[chosen])}


def _positions(columns: Columns) -> dict[str, list[Any]]:
    """Where each record lies on each of the four axes; on the train clock, nowhere before that clock starts."""
    found = {axis: _rounded(columns[name]) for axis, name in AXES.items()}
    return found | {"train": [value or None for value in found["train"]]}


def _rounded(values: Column) -> list[float | int | None]:
    return [_sized(value) for value in values.tolist()]


def _sized(value: float | None) -> float | int | None:
    """Six digits, without a decimal point where there is nothing behind it; null for what is not a number."""
    if value is None or not math.isfinite(value):
        return None
    if value.is_integer():
        return int(value)
    return float(f"{value:.6g}")


def _ablation(ablation: Ablation) -> dict[str, Any]:
    effects: Iterable[dict[str, Any]] = (
        {"title": effect.title, "kind": effect.kind, "noise": effect.noise, **to_dict(effect.loss)}
        for effect in ablation.effects
    )
    return {"waterfall": [to_dict(bar) for bar in ablation.waterfall], "effects": list(effects)}


def is_thinned(runs: Sequence[Run]) -> bool:
    """Whether a curve on the page has fewer points than its run has steps."""
    return any(len(run.curves.steps["step"]) > loss_points(len(runs)) for run in runs)
