"""Where records go: a protocol, the JSONL file that every run has, and one sink that feeds many.

The file is flushed line by line, so a killed run loses at most the line it was writing. A checkpoint stores
`position()`; a resumed run cuts the file there before it writes on, so its curve has no gap and no line twice.
A tracker that fails must never cost a run: it is dropped with one warning. The file is the exception, since without
it there is no run to report.
"""

import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Protocol

from paceline.core.errors import PacelineError, RunError
from paceline.core.files import make_room
from paceline.metrics.records import EvalRecord, StepRecord, to_line


class Sink(Protocol):
    """Takes the records of one run, in order."""

    name: str
    """As it is called in a warning."""
    required: bool
    """Whether its failure ends the run."""

    def step(self, record: StepRecord) -> None: ...

    def evaluation(self, record: EvalRecord) -> None: ...

    def close(self) -> None: ...


class JsonlSink:
    """The run's `metrics.jsonl`."""

    name = "metrics.jsonl"
    required = True

    def __init__(self, path: Path, *, position: int = 0) -> None:
        """Keep the first `position` bytes of the file (0: a new run) and write on from there."""
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if (missing := missing_lines(path, position)) is not None:
            raise RunError(f"{path}: {missing}; put the file back or start a new run")
        self._file: IO[bytes] = open(path, "ab")  # noqa: SIM115 - lives as long as the run
        self._file.truncate(position)

    def step(self, record: StepRecord) -> None:
        self._append(record)

    def evaluation(self, record: EvalRecord) -> None:
        self._append(record)

    def position(self) -> int:
        """Length of the file in bytes, all of it on the disk by then, so that a checkpoint may rely on it."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
        self._file.close()

    def _append(self, record: StepRecord | EvalRecord) -> None:
        try:
            self._file.write(to_line(record).encode("utf-8"))
            self._file.flush()
        except OSError as error:
            raise PacelineError(
                f"{self._path}: cannot be written ({error.strerror}); {make_room(error)}continue with --resume"
            ) from error


def missing_lines(path: Path, position: int, saved: str = "the checkpoint") -> str | None:
    """What is wrong with a file of metrics if it has not the bytes after which a checkpoint was `saved`."""
    held = path.stat().st_size if path.exists() else 0
    if held >= position:
        return None
    return f"holds {held:,} bytes, but {saved} was saved after {position:,}, so lines are missing"


OnRecord = Callable[[StepRecord | EvalRecord], bool | None]


class CallbackSink:
    """A function of the program that runs the run. What it raises is a fault of that program, so it ends the run."""

    name = "callback"
    required = True

    def __init__(self, on_record: OnRecord, stop: Callable[[], None]) -> None:
        """`stop` is called when `on_record` returns True."""
        self._on_record, self._stop = on_record, stop

    def step(self, record: StepRecord) -> None:
        self._tell(record)

    def evaluation(self, record: EvalRecord) -> None:
        self._tell(record)

    def close(self) -> None: ...

    def _tell(self, record: StepRecord | EvalRecord) -> None:
        if self._on_record(record) is True:
            self._stop()


class FanOut:
    """One sink that hands each record to many. See `fan_out`."""

    name = "all sinks"
    required = True

    def __init__(self, sinks: Iterable[Sink], warn: Callable[[str], None]) -> None:
        self._sinks = list(sinks)
        self._warn = warn

    def step(self, record: StepRecord) -> None:
        self._each(lambda sink: sink.step(record))

    def evaluation(self, record: EvalRecord) -> None:
        self._each(lambda sink: sink.evaluation(record))

    def close(self) -> None:
        self._each(lambda sink: sink.close())

    def _each(self, action: Callable[[Sink], None]) -> None:
        for sink in list(self._sinks):
            try:
                action(sink)
            except Exception as error:  # whatever a tracker raises, the run goes on
                if sink.required:
                    raise
                self._sinks.remove(sink)
                self._warn(f"warning: {sink.name} failed and gets no more records ({_first_line(error)})")


def _first_line(error: Exception) -> str:
    said = str(error) if isinstance(error, PacelineError) else f"{type(error).__name__}: {error}"
    return said.splitlines()[0]


def fan_out(sinks: Iterable[Sink], *, warn: Callable[[str], None] | None = None) -> FanOut:
    """All sinks as one. An optional one that raises is dropped with one warning line; a required one ends the run."""
    return FanOut(sinks, warn or (lambda line: print(line, file=sys.stderr, flush=True)))
