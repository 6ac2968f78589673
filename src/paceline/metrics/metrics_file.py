"""What is known after a step and after a validation, as one line of JSON each, and how those lines are read back.

`metrics.jsonl` is the only place where a run's curves are kept. A value that is not finite is written as null, because
JSON has no word for it. A crash can tear the last line and no other, so reading forgives bytes after the last newline.
"""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from paceline.core.errors import ConfigError, RunError
from paceline.core.schema import from_dict, parse_json, to_dict

METRICS_FILE = "metrics.jsonl"
LONGEST_LINE = 64 << 20
"""Bytes; a line has hundreds, and one that was lost stands as spaces before the next."""


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """One optimizer step. The loss is the one whose gradient made the step."""

    step: int
    """Updates done, this one included."""
    train_loss: float | None
    lr_scale: float
    """Multiplier of every base rate in this step."""
    window_tokens: int | None = None
    """None: the preset has no window."""
    tokens: int
    """Training tokens read since step 0."""
    train_s: float
    """By the records' rule; 0 during the untimed steps."""
    wall_s: float
    """Since launch; earlier launches of a resumed run included."""
    tokens_per_s: float | None
    """Over the last few steps."""
    extra: dict = field(default_factory=dict)
    """Name to number: whatever else is switched on."""


@dataclass(frozen=True, kw_only=True)
class EvalMetrics:
    """One validation, after `step` updates, at the window of that step."""

    step: int
    val_loss: float | None
    """Mean over tokens, in nats."""
    val_bpb: float | None = None
    """Bits per byte of the text; comparable between tokenizers."""
    tokens: int
    train_s: float
    wall_s: float
    window_tokens: int | None = None
    extra: dict = field(default_factory=dict)


Metrics = StepMetrics | EvalMetrics


def finite(value: Any) -> Any:
    """`value` with None in place of every NaN and infinity, at any depth."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, list | tuple) else value


def to_line(metrics: Metrics) -> str:
    """One line, newline included; an empty `extra` is left out."""
    values = {name: value for name, value in finite(to_dict(metrics)).items() if name != "extra" or value}
    kind = "step" if isinstance(metrics, StepMetrics) else "eval"
    return json.dumps({"kind": kind, **values}, allow_nan=False) + "\n"


def from_line(line: str) -> Metrics:
    """Inverse of `to_line`. Raises ValueError or ConfigError on anything else."""
    values = parse_json(line)
    kind = values.pop("kind", None) if isinstance(values, dict) else None
    if kind not in ("step", "eval"):
        raise ConfigError(f"kind is {kind!r}, not step or eval")
    return from_dict(StepMetrics, values) if kind == "step" else from_dict(EvalMetrics, values)


def read_rest(file: IO[bytes]) -> bytes:
    """What follows in an open file of metrics; a RunError where no line ends in more bytes than any record has."""
    pieces = list[bytes]()
    while piece := file.read(LONGEST_LINE):
        if len(piece) == LONGEST_LINE and b"\n" not in piece:
            raise RunError(f"{file.name}: {LONGEST_LINE:,} bytes without the end of a line; the file is damaged")
        pieces.append(piece)
    return b"".join(pieces)


def read_metrics(folder: Path) -> tuple[list[StepMetrics], list[EvalMetrics]]:
    """Every record of the run in `folder`, in the order written. A torn last line is left out."""
    path = folder / METRICS_FILE
    try:
        with open(path, "rb") as file:
            whole_lines = read_rest(file).split(b"\n")[:-1]  # after the last newline: nothing, or a torn line
    except OSError as error:
        raise RunError(f"{path}: cannot be read ({error.strerror}); give the folder of a run") from None
    found = list[Metrics]()
    for number, line in enumerate(whole_lines, start=1):
        try:
            found.append(from_line(line.decode("utf-8")))
        except (ValueError, RecursionError, ConfigError) as error:
            raise RunError(f"{path}, line {number}: not a record ({error}); the file is damaged") from None
    return [m for m in found if isinstance(m, StepMetrics)], [m for m in found if isinstance(m, EvalMetrics)]
