"""A run as a report sees it: its card, its config and its metrics, nothing else. No torch."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.core.errors import ConfigError, RunError
from paceline.core.schema import read_json
from paceline.metrics.card import RunCard, read_card
from paceline.metrics.records import EvalRecord, StepRecord, read_metrics

CONFIG_FILE = "config.json"
SMOOTHING_SHARE = 0.02
"""Half-life of the smoothed training loss, as a share of the recorded steps."""


@dataclass(frozen=True, kw_only=True)
class Run:
    label: str
    """Unique on the page."""
    card: RunCard
    config: dict[str, Any]
    """Dotted name to value. Read without a schema, so that a run of another version can still be shown."""
    steps: list[StepRecord]
    evals: list[EvalRecord]


def load_runs(folders: Sequence[Path]) -> list[Run]:
    """Every run, each under a label of its own; the first damaged file is an error that names it."""
    if not folders:
        raise RunError("no run was given to report on; name at least one, such as runs/demo")
    runs: list[Run] = []
    for folder in folders:
        runs.append(_load(folder, [run.label for run in runs]))
    return runs


def _load(folder: Path, taken: list[str]) -> Run:
    card = read_card(folder)
    steps, evals = read_metrics(folder)
    same = sum(label == card.name or label.startswith(f"{card.name} (") for label in taken)
    label = f"{card.name} ({same + 1})" if same else card.name
    return Run(label=label, card=card, config=_read_config(folder / CONFIG_FILE), steps=steps, evals=evals)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        values = read_json(path)
    except ConfigError as error:
        raise RunError(str(error)) from None
    if not isinstance(values, dict):
        raise RunError(f"{path}: holds no configuration; the file is damaged")
    return dict(_leaves(values, ""))


def _leaves(values: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def smoothed(values: Sequence[float | None]) -> list[float | None]:
    """A mean over both sides, weights falling by half every `SMOOTHING_SHARE` of the run: the usual one-sided mean
    would lag behind a falling loss and show it too high. A value that is missing leaves a gap."""
    keep = 0.5 ** (1.0 / max(1.0, SMOOTHING_SHARE * len(values)))
    sums = _two_sided([value or 0.0 for value in values], keep)
    weights = _two_sided([0.0 if value is None else 1.0 for value in values], keep)
    return [
        None if value is None else total / weight for value, total, weight in zip(values, sums, weights, strict=True)
    ]


def _two_sided(values: Sequence[float], keep: float) -> list[float]:
    """For each place the sum of all values, each times keep to the power of its distance."""
    before = list(itertools.accumulate(values, lambda total, value: keep * total + value))
    after = list(itertools.accumulate(reversed(values), lambda total, value: keep * total + value))[::-1]
    return [left + right - value for left, right, value in zip(before, after, values, strict=True)]
