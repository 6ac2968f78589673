"""The curves of a run as columns, from `metrics.jsonl`, which may still be growing. No torch.

A page may be about 200 runs of 2,000 steps. A record object for each line would take 20 s of processor time; here all
new lines of a file are parsed at once, in 2 s for those runs, and the strict reader is asked only about lines that this
one does not understand, to say which line it is and why. A noisy curve gets a smoothed twin, a long one fewer points.
"""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import RunError
from paceline.metrics.metrics_file import METRICS_FILE, read_metrics, read_rest

Column = NDArray[np.float64]
Columns = dict[str, Column]  # name of a field to its value in every record, NaN where the record has none

STEP_FIELDS = ("step", "tokens", "train_s", "wall_s", "lr_scale", "train_loss", "window_tokens", "tokens_per_s")
EVAL_FIELDS = ("step", "tokens", "train_s", "wall_s", "val_loss", "val_bpb")
MEMORY_FIELD = "allocated_bytes"  # among a step's extras, if diagnostics were on
SMOOTHING_SHARE = 0.02  # half-life of the smoothed training loss, as a share of the recorded steps
MAY_LACK = frozenset({"train_loss", "window_tokens", "tokens_per_s", "val_loss", "val_bpb", MEMORY_FIELD})


@dataclass(frozen=True, eq=False)
class Curves:
    steps: Columns
    evals: Columns

    @classmethod
    def none(cls) -> "Curves":
        return cls(_columns([], STEP_FIELDS), _columns([], EVAL_FIELDS))


class MetricsFile:
    """The curves of one file as they stand; a second reading parses what is new. A line without its end is left for
    later. A resumed run cuts its file: if the line read last is not where it was, everything is read anew."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / METRICS_FILE
        self._forget()

    def _forget(self) -> None:
        self._position, self._last_line = 0, b""
        self._curves = Curves.none()

    def read(self) -> Curves:
        if lines := self._new_lines():
            new = _parsed(self._path, lines)
            self._curves = Curves(_joined(self._curves.steps, new.steps), _joined(self._curves.evals, new.evals))
            if any((np.diff(part["step"]) < 0).any() for part in (self._curves.steps, self._curves.evals)):
                raise RunError(f"{self._path}: its steps do not follow each other; the file is damaged")
            self._position += sum(len(line) + 1 for line in lines)
            self._last_line = lines[-1] + b"\n"
        return self._curves

    def _new_lines(self) -> list[bytes]:
        try:
            with open(self._path, "rb") as file:
                file.seek(self._position - len(self._last_line))
                found = read_rest(file)
                if not found.startswith(self._last_line):
                    self._forget()
                    file.seek(0)
                    found = read_rest(file)
        except OSError as error:
            raise RunError(f"{self._path}: cannot be read ({error.strerror}); give the folder of a run") from None
        return found[len(self._last_line) :].split(b"\n")[:-1]


def _parsed(path: Path, lines: Sequence[bytes]) -> Curves:
    try:
        rows = json.loads(b"[" + b",".join(lines) + b"]", parse_constant=_refuse_constant)
        if len(rows) != len(lines):
            raise ValueError("a line holds more than one record")
        by_kind = {kind: [row for row in rows if row["kind"] == kind] for kind in ("step", "eval")}
        if sum(map(len, by_kind.values())) != len(rows):
            raise ValueError("a record of a kind that is not known")
        return Curves(_columns(by_kind["step"], STEP_FIELDS), _columns(by_kind["eval"], EVAL_FIELDS))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        read_metrics(path.parent)  # says which line it is
        raise RunError(f"{path}: not the records of a run ({error}); the file is damaged") from None


def _refuse_constant(word: str) -> None:
    raise ValueError(f"{word} is not a number")


def _columns(rows: Sequence[dict[str, Any]], fields: Sequence[str]) -> Columns:
    found = {name: _column(name, [row.get(name) if name in MAY_LACK else row[name] for row in rows]) for name in fields}
    if fields is STEP_FIELDS:
        found[MEMORY_FIELD] = _column(MEMORY_FIELD, [row.get("extra", {}).get(MEMORY_FIELD) for row in rows])
    return found


def _column(name: str, values: list[Any]) -> Column:
    allowed = {int, float, type(None)} if name in MAY_LACK else {int, float}
    if not set(map(type, values)) <= allowed:
        raise ValueError(f"{name} is not a number everywhere")
    return np.array(values, dtype=np.float64)


def _joined(old: Columns, new: Columns) -> Columns:
    return {name: np.concatenate([old[name], new[name]]) for name in new}


# ---- long lines with few points


def smoothed(values: Column) -> Column:
    """A mean over both sides, weights falling by half every `SMOOTHING_SHARE` of the run: the usual one-sided mean
    would lag behind a falling loss and show it too high. A value that is missing leaves a gap."""
    keep = 0.5 ** (1.0 / max(1.0, SMOOTHING_SHARE * len(values)))
    missing = np.isnan(values)
    sums = _two_sided(np.where(missing, 0.0, values).tolist(), keep)
    weights = _two_sided((~missing).astype(float).tolist(), keep)
    smooth: Column = np.divide(sums, weights, out=np.full(len(values), np.nan), where=~missing)
    return smooth


def _two_sided(values: Sequence[float], keep: float) -> Column:
    """For each place the sum of all values, each times keep to the power of its distance."""
    before = list(itertools.accumulate(values, lambda total, value: keep * total + value))
    after = list(itertools.accumulate(reversed(values), lambda total, value: keep * total + value))[::-1]
    total: Column = np.array(before) + np.array(after) - np.array(values)
    return total


def kept(values: Column, points: int) -> NDArray[np.intp]:
    """Indices of at most `points` values, at least 4: both ends, and of each stretch lowest and highest, for spikes."""
    count = len(values)
    if count <= points:
        return np.arange(count)
    edges = np.linspace(0, count, points // 2).astype(int)  # one stretch fewer than half: room for both ends
    lowest, highest = np.where(np.isnan(values), np.inf, values), np.where(np.isnan(values), -np.inf, values)
    chosen = {0, count - 1}
    for start, end in itertools.pairwise(edges.tolist()):
        chosen |= {start + int(lowest[start:end].argmin()), start + int(highest[start:end].argmax())}
    return np.array(sorted(chosen))
