"""`ablation.json`, the result of an ablation beside its runs: written by the lab, shown on pages. No torch."""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from paceline.analysis.runs import LeftOut, check_finite
from paceline.core.errors import ConfigError, RunError
from paceline.core.files import is_plain_name, write_json
from paceline.core.schema import from_dict, read_json, to_dict

ABLATION_FILE = "ablation.json"
ABLATION_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Arm:
    name: str
    kind: Literal["full", "base", "without", "with"]
    technique: str | None = None
    runs: tuple[str, ...]  # names of folders, one per seed, in the order of the seeds
    losses: tuple[float | None, ...] = ()  # their final validation losses


@dataclass(frozen=True, kw_only=True)
class Difference:
    """With the part minus without it: mean over paired seeds, 95 % interval, p-values alone and after Holm."""

    mean: float
    low: float | None = None
    high: float | None = None
    p: float | None = None
    p_holm: float | None = None  # None: one seed has no interval


@dataclass(frozen=True, kw_only=True)
class Effect:
    technique: str
    title: str
    kind: Literal["leave-one-out", "add-one-in"]
    n: int
    """Seeds."""
    loss: Difference
    time_at_equal_loss_s: Difference | None = None
    step_s: Difference | None = None
    memory_gib: Difference | None = None
    noise: bool
    """No measurable effect on the loss: the corrected p-value is not below 0.05."""
    words: str


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One bar of the waterfall: a loss at start and end, a difference between."""

    label: str
    value: float
    kind: Literal["start", "step", "interaction", "end"]

    @property
    def is_whole(self) -> bool:
        return self.kind in ("start", "end")

    @property
    def shown(self) -> str:
        return f"{self.value:.4f}" if self.is_whole else f"{self.value:+.4f}"


@dataclass(frozen=True, kw_only=True)
class Exchange:
    steps_per_loss: float  # steps that one unit of loss is worth at the end of the curve
    at_step: float


@dataclass(frozen=True, kw_only=True)
class LeftOutArm:
    """A part of the difference that has no arm."""

    arm: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Ablation:
    """What an ablation found."""

    format: int = ABLATION_FORMAT
    preset: str
    against: str
    scale: str | None = None
    indicative: bool
    """Too small to settle a claim about the full size."""
    why_indicative: str | None = None
    steps: int
    seeds: tuple[int, ...]
    hardware: str
    made: str
    """ISO 8601 with offset."""
    arms: tuple[Arm, ...]
    left_out: tuple[LeftOutArm, ...] = ()
    not_counted: tuple[LeftOut, ...] = ()
    """Runs that are in no mean."""
    effects: tuple[Effect, ...]
    waterfall: tuple[Bar, ...]
    """From the older config's loss to the newer one's; empty while one of the two has no run."""
    exchange: Exchange | None = None

    @property
    def title(self) -> str:
        """What is held against what."""
        techniques = ", ".join(dict.fromkeys(effect.title for effect in self.effects))
        alone = self.preset == self.against and techniques
        return f"{self.preset} with and without {techniques}" if alone else f"{self.preset} against {self.against}"


def read_ablations(folders: Iterable[Path]) -> tuple[dict[Path, Ablation], list[str]]:
    """By folder; and a sentence for each that cannot be read."""
    found, damaged = {}, []
    for folder in folders:
        try:
            found[folder] = read_ablation(folder)
        except RunError as error:
            damaged.append(str(error))
    return found, damaged


def write_ablation(ablation: Ablation, folder: Path) -> Path:
    path = folder / ABLATION_FILE
    write_json(path, to_dict(ablation))
    return path


def read_ablation(folder: Path) -> Ablation:
    """The ablation in `folder`, or a RunError that names the file and what is wrong with it."""
    path = folder / ABLATION_FILE
    try:
        values = read_json(path)
        found = values.get("format") if isinstance(values, dict) else None
        if found != ABLATION_FORMAT:
            raise RunError(f"{path}: has format {found!r}, this version reads {ABLATION_FORMAT}; ablate again")
        check_finite(path, values)
        known = _known(Ablation, values)
        if isinstance(arms := known.get("arms"), list):
            known["arms"] = [_known(Arm, arm) for arm in arms]
        ablation = from_dict(Ablation, known)
    except ConfigError as error:
        place = "" if str(error).startswith(str(path)) else f"{path}: "
        raise RunError(f"{place}{error}") from None
    if odd := [name for arm in ablation.arms for name in arm.runs if not is_plain_name(name)]:
        raise RunError(f"{path}: the run {odd[0]!r} is not the name of a folder beside it; the file is damaged")
    return ablation


def _known(kind: type, values: Any) -> Any:
    """Without keys beside the schema's: a note, or what an older version kept there."""
    names = {field.name for field in dataclasses.fields(kind)}
    return {name: value for name, value in values.items() if name in names} if isinstance(values, dict) else values
