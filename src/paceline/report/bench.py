"""Where a step's time goes, from files that `paceline bench step --out` wrote. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.core.errors import ConfigError, RunError
from paceline.core.schema import read_json
from paceline.report.runs import check_finite


@dataclass(frozen=True, kw_only=True)
class Bench:
    label: str
    hardware: str
    step_s: float | None
    """Mean over the schedule."""
    peak_gib: float | None
    profiled_s: float
    """The profiled step, whose shares follow."""
    shares: Mapping[str, float]
    """Class of work to its share of the profiled step."""


def read_bench(path: Path) -> Bench:
    """A result with a profile in it, or a RunError that names the file."""
    try:
        values = read_json(path)
    except ConfigError as error:
        raise RunError(str(error)) from None
    check_finite(path, values)
    try:
        return Bench(
            label=_label(values),
            hardware=str(values["hardware"].get("gpu") or values["hardware"].get("cpu")),
            step_s=_number(values["step_s"]),
            peak_gib=_number(values["peak_gib"]),
            profiled_s=float(values["profiled_step_s"]),
            shares={str(name): float(share) for name, share in values["shares"].items()},
        )
    except (KeyError, TypeError, AttributeError, ValueError):
        raise RunError(
            f"{path}: not the result of a profiled step; make one with paceline bench step --out {path.name}"
        ) from None


def _label(values: Mapping[str, Any]) -> str:
    scale = str(values["scale"])
    return str(values["preset"]) if scale == "1" else f"{values['preset']} at scale {scale}"


def _number(value: Any) -> float | None:
    return None if value is None else float(value)
