"""What is known after a step and after a validation, a line of JSON each, read back also from a damaged file.

`metrics.jsonl` is the only place where a run's curves are kept. A value that is not finite is written as null, because
JSON has no word for it. A crash can tear the last line and no other, so reading forgives bytes after the last newline.
"""

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from paceline.core.errors import ConfigError, RunError
from paceline.core.files import atomic_write
from paceline.core.schema import from_dict, parse_json, to_dict

METRICS_FILE = "metrics.jsonl"
LONGEST_LINE = 64 << 20  # bytes; a line has hundreds, and one that was lost stands as spaces before the next


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """One optimizer step. The loss is the one whose gradient made the step."""

    step: int  # updates done, this one included
    train_loss: float | None
    lr_scale: float  # multiplier of every base rate in this step
    window_tokens: int | None = None  # None: the preset has no window
    tokens: int  # training tokens read since step 0
    train_s: float  # by the records' rule; 0 during the untimed steps
    wall_s: float  # since launch; earlier launches of a resumed run included
    tokens_per_s: float | None  # over the last few steps
    extra: dict = field(default_factory=dict)  # name to number: whatever else is switched on


@dataclass(frozen=True, kw_only=True)
class EvalMetrics:
    """One validation, after `step` updates, at the window of that step."""

    step: int
    val_loss: float | None  # mean over tokens, in nats
    val_bpb: float | None = None  # bits per byte of the text; comparable between tokenizers
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
    path, found = folder / METRICS_FILE, list[Metrics]()
    whole_lines = _bytes(path).split(b"\n")[:-1]  # after the last newline: nothing, or a torn line
    for number, line in enumerate(whole_lines, start=1):
        try:
            found.append(from_line(line.decode("utf-8")))
        except (ValueError, RecursionError, ConfigError) as error:
            raise RunError(f"{path}, line {number}: not a record ({error}); the file is damaged") from None
    return [m for m in found if isinstance(m, StepMetrics)], [m for m in found if isinstance(m, EvalMetrics)]


def readable(path: Path) -> list[Metrics]:
    """The records that can be read, in the order written; none of a file that is not there."""
    return [record for line in _lines(_bytes(path, may_lack=True)) if (record := _record(line)) is not None]


def rebuild(path: Path, size: int, kept: Sequence[EvalMetrics]) -> str | None:
    """Put the first `size` bytes of the file in order, with the validations that a checkpoint has kept; the file as it
    was stays beside it. Returns what was wrong; None: nothing. A line that is lost is replaced by as many spaces, which
    every reader of JSON skips before the next record, so that all checkpoints still find their place in the file."""
    data = _bytes(path, may_lack=True)
    lines = _lines(data[:size])
    records = [_record(line) for line in lines]
    lost = sum(record is None and line.strip(b" ") != b"" for line, record in zip(lines, records, strict=True))
    if not lost:
        return None
    there = {record.step for record in records if isinstance(record, EvalMetrics)}
    missing = sorted((record for record in kept if record.step not in there), key=lambda record: record.step)
    back, following = list[int](), math.inf
    for index in reversed(range(len(lines))):
        record, width = records[index], len(lines[index])
        if record is not None:
            following = record.step
            continue
        fits = missing and missing[-1].step <= following and len(to_line(missing[-1])) <= width
        if fits:
            back.append(following := missing[-1].step)
        lines[index] = (to_line(missing.pop()).encode() if fits else b"").rjust(width)
    shutil.copy2(path, aside := path.with_name(f"{path.name}.damaged"))
    with atomic_write(path) as file:
        file.write(b"".join(lines) + data[size:])
    steps = ", ".join(map(str, reversed(back)))
    restored = f"; of the validations, that of step {steps} is put back from the checkpoint" if back else ""
    return f"{path.name}: {lost} of {len(lines)} lines could not be read and are left out ({aside.name}){restored}"


def _lines(data: bytes) -> list[bytes]:
    """With their newlines; the last may be torn."""
    *whole, torn = data.split(b"\n")
    return [*(line + b"\n" for line in whole), *([torn] if torn else [])]


def _record(line: bytes) -> Metrics | None:
    """None: nothing that can be read."""
    try:
        return from_line(line.decode("utf-8")) if line.endswith(b"\n") else None
    except (ValueError, RecursionError, ConfigError):
        return None


def _bytes(path: Path, *, may_lack: bool = False) -> bytes:
    try:
        with open(path, "rb") as file:
            return read_rest(file)
    except OSError as error:
        if may_lack and isinstance(error, FileNotFoundError):
            return b""
        raise RunError(f"{path}: cannot be read ({error.strerror}); give the folder of a run") from None
