"""What of a damaged metrics.jsonl can still be read, and putting it in order before a run goes on.

Checkpoints cut the file at a number of bytes, so a line that is lost is replaced by as many spaces, which stand before
the next record and which every reader of JSON skips: all checkpoints still find their place. A validation that the
checkpoint has kept goes back where its line was.
"""

import math
import shutil
from collections.abc import Sequence
from pathlib import Path

from paceline.core.errors import ConfigError, RunError
from paceline.core.files import atomic_write
from paceline.metrics.metrics_file import EvalMetrics, Metrics, from_line, read_rest, to_line


def readable(path: Path) -> list[Metrics]:
    """The records that can be read, in the order written; none of a file that is not there."""
    return [record for line in _lines(_bytes(path)) if (record := _record(line)) is not None]


def rebuild(path: Path, size: int, kept: Sequence[EvalMetrics]) -> str | None:
    """Put the first `size` bytes of the file in order, with the validations that a checkpoint has kept; the file as it
    was stays beside it. Returns what was wrong; None: nothing."""
    data = _bytes(path)
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


def _bytes(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            return read_rest(file)
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise RunError(f"{path}: cannot be read ({error.strerror})") from None
