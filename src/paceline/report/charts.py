"""The numbers behind the page's charts, which assets/report.js draws: curves, means and bands, parts of wall time."""

import functools
import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from paceline.analysis.groups import Group
from paceline.core.schema import to_dict
from paceline.report.curves import MEMORY_FIELD, Column, Columns, kept
from paceline.report.subject import Run, Subject, mean_time
from paceline.settings.run import RunConfig
from paceline.settings.schedule import muon_momentum, tokens_before, windows_at

MOST_POINTS = 1_500  # of one line: more than a screen is wide
ALL_POINTS = 40_000  # of all loss curves together, so that a page of 200 runs stays small and is drawn in seconds
FEWEST_POINTS = 100
SMALL_CHART_POINTS = (10_000, 300, 50)  # the same of the small charts: of all lines, of one at most and at least
RAW_RUNS = 6  # with more runs than this the loss of every single step would be a cloud, and is left out
AXES = {"step": "step", "tokens": "tokens", "train": "train_s", "wall": "wall_s"}
PARTS = ("launch to first step", "free first steps", "timed steps", "validation, saving, the rest")
"""Of the wall time, in this order. Compilation is in the free first steps."""
START_SHARE = 0.05  # of the steps, left out of the frame: their losses fall so far that the rest would be a flat line
MOST_BARS = 30  # of a bar chart; the table has all
SMALL_CHARTS = {
    "batch": "Batch (tokens)",
    "window": "Attention window (tokens)",
    "lr": "Learning-rate multiplier",
    "momentum": "Momentum of Muon",
    "rate": "Tokens per second",
    "allocated": "Memory allocated on the GPU (GiB)",
}
"""Titles. Each further window kind has a chart of its own, `window-KIND`."""


def chart_data(subject: Subject) -> dict[str, Any]:
    points = loss_points(len(subject.runs))
    group_of = {run: number for number, group in enumerate(subject.groups) for run in group.members}
    in_mean = {run for group in subject.groups for run in group.drawn}
    raw = len(subject.runs) <= RAW_RUNS
    return {
        "runs": [
            {
                "label": run.label,
                "group": group_of[run],
                "in_mean": run in in_mean,
                "steps": run.card.steps,
                **_curves(run, points, raw),
            }
            for run in subject.runs
        ],
        "groups": [_group(group, points, len(subject.groups)) for group in subject.groups],
        "parts": list(PARTS),
        "most_bars": MOST_BARS,
        "start_share": START_SHARE,
        "ablations": [
            {
                "waterfall": [to_dict(bar) for bar in one.waterfall],
                "effects": [
                    {"title": e.title, "kind": e.kind, "noise": e.noise, **to_dict(e.loss)} for e in one.effects
                ],
            }
            for one in subject.ablations
        ],
    }


def as_script(data: dict[str, Any]) -> str:
    """JSON that may stand inside a script element: `<` is written as an escape."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def loss_points(lines: int) -> int:
    return max(FEWEST_POINTS, min(MOST_POINTS, ALL_POINTS // max(1, lines)))


class Band(NamedTuple):
    """Mean of a value over the runs of a group, and its lowest and highest, at the steps that all of them have."""

    at: Columns  # step, tokens, train_s, wall_s, each the mean of the runs; NaN for times that may not be averaged
    mean: Column
    low: Column
    high: Column


def training_band(group: Group[Run]) -> Band | None:
    return _band(group, [(run.curves.steps, run.smooth_loss) for run in group.drawn])


def validation_band(group: Group[Run]) -> Band | None:
    return _band(group, [(run.curves.evals, run.curves.evals["val_loss"]) for run in group.drawn])


def _band(group: Group[Run], curves: Sequence[tuple[Columns, Column]]) -> Band | None:
    """Of positions and values, a pair for each run. None of a single run, which is its own line."""
    if len(curves) < 2:
        return None
    common = functools.reduce(np.intersect1d, [columns["step"] for columns, _ in curves])
    places = [np.searchsorted(columns["step"], common) for columns, _ in curves]
    values = np.stack([value[place] for (_, value), place in zip(curves, places, strict=True)])
    at = {
        name: np.mean([columns[name][place] for (columns, _), place in zip(curves, places, strict=True)], axis=0)
        for name in AXES.values()
    }
    if not group.times_comparable:
        at |= {name: np.full(len(common), np.nan) for name in ("train_s", "wall_s")}
    return Band(at, values.mean(axis=0), values.min(axis=0), values.max(axis=0))


def wall_parts(group: Group[Run]) -> list[float | None]:
    """Seconds of each of PARTS, mean over the runs that count; None where there is no mean or the cards do not say."""
    return [mean_time(group, functools.partial(_part, number)) for number in range(len(PARTS))]


def _part(number: int, run: Run) -> float | None:
    card = run.card
    if card.wall_s is None or card.train_s is None:
        return None
    start_s, first_s = card.startup_s or 0.0, card.first_steps_s or 0.0
    return (start_s, first_s, card.train_s, max(0.0, card.wall_s - card.train_s - start_s - first_s))[number]


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


def _group(group: Group[Run], points: int, num_groups: int) -> dict[str, Any]:
    return {
        "label": group.label,
        "n": len(group.members),
        "mean": _line(training_band(group), points),
        "val": _line(validation_band(group), points),
        "schedule": small_charts(group, num_groups),
        "wall": [_sized(part) for part in wall_parts(group)],
        "peak": max((run.card.peak_bytes for run in group.members if run.card.peak_bytes is not None), default=None),
    }


def _line(band: Band | None, points: int) -> dict[str, Any] | None:
    if band is None:
        return None
    chosen = kept(band.mean, points)
    return {
        "x": _positions({name: band.at[name][chosen] for name in AXES.values()}),
        **{name: _rounded(getattr(band, name)[chosen]) for name in ("mean", "low", "high")},
    }


def small_charts(group: Group[Run], num_groups: int) -> dict[str, dict[str, Any]]:
    """By chart: the first run's schedule, which is that of all, and the speed, the mean over runs."""
    all_points, most, fewest = SMALL_CHART_POINTS
    points = max(fewest, min(most, all_points // num_groups))
    steps, shown = group.first.curves.steps, 1.0 if group.times_comparable else np.nan
    mean = _band(group, [(run.curves.steps, shown * run.curves.steps["tokens_per_s"]) for run in group.drawn])
    speed = (steps["step"], steps["tokens_per_s"]) if mean is None else (mean.at["step"], mean.mean)
    drawn = {"lr": (steps["step"], steps["lr_scale"]), "rate": speed, "window": (steps["step"], steps["window_tokens"])}
    drawn |= {"allocated": (steps["step"], steps[MEMORY_FIELD] / 2**30), **_planned(group.first, points)}
    small = {name: (x, y, kept(y, points)) for name, (x, y) in drawn.items() if (y > 0).any()}
    return {name: {"x": _rounded(x[chosen]), "y": _rounded(y[chosen])} for name, (x, y, chosen) in small.items()}


def _planned(run: Run, points: int) -> dict[str, tuple[Column, Column]]:
    """By the run's settings, at some recorded steps: each window kind, and batch and momentum if these change."""
    recorded = run.curves.steps["step"]
    if run.settings is None or not len(recorded):
        return {}
    at = recorded[np.linspace(0, len(recorded) - 1, min(points, len(recorded))).astype(int)]
    rows = [_settings_at(run.settings, int(step) - 1) for step in at]
    columns = {name: np.array([row[name] for row in rows], dtype=np.float64) for name in rows[0]}
    return {name: (at, y) for name, y in columns.items() if name.startswith("window") or (y != y[0]).any()}


def _settings_at(run: RunConfig, step: int) -> dict[str, float]:
    windows = {"window" if kind == "short" else f"window-{kind}": n for kind, n in windows_at(run, step).items()}
    batch = tokens_before(run, step + 1) - tokens_before(run, step)
    return {**windows, "batch": batch, "momentum": muon_momentum(step, run.steps, run.optim.muon)}


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
