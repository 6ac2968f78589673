"""A run as a report sees it: its card, its config and its metrics, nothing else. No torch."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from paceline.core.errors import ConfigError, RunError
from paceline.core.schema import read_json, to_dict
from paceline.metrics.card import CARD_FILE, RunCard, read_card
from paceline.metrics.records import finite
from paceline.report.curves import Column, Curves, MetricsFile
from paceline.report.thinning import smoothed

CONFIG_FILE = "config.json"


@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    label: str
    """Unique on the page."""
    folder: Path
    card: RunCard
    config: dict[str, Any]
    """Dotted name to value. Read without a schema, so that a run of another version can still be shown."""
    curves: Curves
    arm: str | None = None
    """Which side of an ablation it is."""

    @cached_property
    def smooth_loss(self) -> Column:
        return smoothed(self.curves.steps["train_loss"])

    @property
    def steps_done(self) -> int:
        """The card is written at validations only; a run in progress is further than that."""
        return int(max([self.card.steps_done, *self.curves.steps["step"][-1:]]))

    @property
    def is_timed(self) -> bool:
        """Whether any step was: the first ones are free, and their clock, if it shows anything, shows no step."""
        free = self.config.get("train.free_steps")
        return not isinstance(free, int) or self.steps_done > free

    @property
    def train_s(self) -> float | None:
        return self._newest("train_s", self.card.train_s) if self.is_timed else None

    @property
    def wall_s(self) -> float | None:
        return self._newest("wall_s", self.card.wall_s)

    def _newest(self, clock: str, on_card: float | None) -> float | None:
        return max([*self.curves.steps[clock][-1:].tolist(), *([] if on_card is None else [on_card])], default=None)

    @property
    def hardware(self) -> str:
        """By name, with the number of processes if there are several."""
        name = str(self.card.environment.get("gpu" if self.card.device == "cuda" else "cpu", self.card.device))
        return name if self.card.ranks == 1 else f"{self.card.ranks} × {name}"


@dataclass(frozen=True)
class Place:
    """Where a run lies, and which arm of an ablation it is."""

    folder: Path
    arm: str | None = None


def load_runs(places: Sequence[Place]) -> tuple[list[Run], list[str]]:
    """Every readable run, each under a label of its own, and a sentence for each that is not. None: an error."""
    if not places:
        raise RunError("no run was given to report on; name at least one, such as runs/demo")
    runs: list[Run] = []
    left_out: list[str] = []
    for place in places:
        try:
            runs.append(load_run(place, MetricsFile(place.folder).read, [run.label for run in runs]))
        except RunError as error:
            left_out.append(str(error))
    if not runs:
        raise RunError(left_out[0])
    return runs, left_out


def load_run(place: Place, read_curves: Callable[[], Curves], taken: Sequence[str]) -> Run:
    """The run at a place, under a label that is not taken, or a RunError that names the damaged file."""
    card = read_card(place.folder)
    check_finite(place.folder / CARD_FILE, to_dict(card))
    config = read_config(place.folder)
    same = sum(label == card.name or label.startswith(f"{card.name} (") for label in taken)
    label = f"{card.name} ({same + 1})" if same else card.name
    return Run(label=label, folder=place.folder, card=card, config=config, curves=read_curves(), arm=place.arm)


def check_finite(path: Path, values: Any) -> None:
    """JSON has no infinity, but 1e999 is read as one, and nothing on a page could show it."""
    if finite(values) != values:
        raise RunError(f"{path}: holds a number beyond all bounds; the file is damaged")


def read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_FILE
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
