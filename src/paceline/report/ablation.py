"""What an ablation leaves in its folder: `ablation.json`, beside the folders of its runs. No torch.

The file is written by the lab; a page only shows it, and leaves alone what the lab keeps there for itself. A file of
another format, or with something else where a number should be, is said to be one instead of being shown in part.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from paceline.core.errors import ConfigError, RunError
from paceline.core.files import is_plain_name
from paceline.core.schema import from_dict, read_json
from paceline.report.runs import Place, check_finite

ABLATION_FILE = "ablation.json"
ABLATION_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Arm:
    name: str
    kind: Literal["full", "base", "without", "with"]
    technique: str | None = None
    runs: tuple[str, ...]
    """Names of folders, one per seed, in the order of the seeds."""


@dataclass(frozen=True, kw_only=True)
class Estimated:
    """With the technique minus without it: mean over paired seeds, 95 % interval, p-values alone and after Holm."""

    mean: float
    low: float | None = None
    high: float | None = None
    p: float | None = None
    p_holm: float | None = None
    """None: one seed has no interval."""


@dataclass(frozen=True, kw_only=True)
class Effect:
    technique: str
    title: str
    kind: Literal["leave-one-out", "add-one-in"]
    n: int
    """Seeds."""
    loss: Estimated
    time_at_equal_loss_s: Estimated | None = None
    step_s: Estimated | None = None
    memory_gib: Estimated | None = None
    noise: bool
    """Whether the difference may be chance."""
    words: str


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One bar of the waterfall: a loss at start and end, a difference between."""

    label: str
    value: float
    kind: Literal["start", "step", "interaction", "end"]


@dataclass(frozen=True, kw_only=True)
class Exchange:
    steps_per_loss: float
    """Steps that one unit of loss is worth at the end of the curve."""
    at_step: float


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """A part of the difference that has no arm."""

    arm: str
    why: str


@dataclass(frozen=True, kw_only=True)
class NotCounted:
    """A run that is in no mean."""

    run: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Ablation:
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
    arms: tuple[Arm, ...]
    left_out: tuple[LeftOut, ...] = ()
    not_counted: tuple[NotCounted, ...] = ()
    effects: tuple[Effect, ...]
    waterfall: tuple[Bar, ...]
    """Empty while one of the two presets has no run."""
    exchange: Exchange | None = None


def is_ablation(folder: Path) -> bool:
    return (folder / ABLATION_FILE).is_file()


def read_ablation(folder: Path) -> Ablation:
    """The ablation in `folder`, or a RunError that names the file and what is wrong with it."""
    path = folder / ABLATION_FILE
    try:
        values = read_json(path)
        found = values.get("format") if isinstance(values, dict) else None
        if found != ABLATION_FORMAT:
            raise RunError(f"{path}: has format {found!r}, this version reads {ABLATION_FORMAT}; ablate again")
        check_finite(path, values)
        ablation = from_dict(Ablation, _known(values))
    except ConfigError as error:
        place = "" if str(error).startswith(str(path)) else f"{path}: "
        raise RunError(f"{place}{error}") from None
    if odd := [name for arm in ablation.arms for name in arm.runs if not is_plain_name(name)]:
        raise RunError(f"{path}: the run {odd[0]!r} is not the name of a folder beside it; the file is damaged")
    return ablation


def _known(values: dict[str, Any]) -> dict[str, Any]:
    """Without the keys that are not shown."""
    known: dict[str, Any] = _only(Ablation, values)
    lists = {name: values[name] for name in ("arms", "effects") if isinstance(values.get(name), list)}
    kinds = {"arms": Arm, "effects": Effect}
    return known | {name: [_only(kinds[name], one) for one in found] for name, found in lists.items()}


def _only(kind: type, values: Any) -> Any:
    names = {field.name for field in dataclasses.fields(kind)}
    return {name: value for name, value in values.items() if name in names} if isinstance(values, dict) else values


def places_of(ablation: Ablation, folder: Path) -> list[Place]:
    """Where its runs lie."""
    return [Place(folder / name, arm.name) for arm in ablation.arms for name in arm.runs]
