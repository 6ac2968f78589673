"""Where metrics go: a protocol, the JSONL file that every run has, and one sink that feeds many.

The file is flushed line by line. A checkpoint stores `position()`; a resumed run cuts the file there before it writes
on, so its curve has no gap and no line twice. A tracker that fails is dropped with one warning.
"""

import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from paceline.core.errors import PacelineError, RunError
from paceline.core.files import make_room
from paceline.core.output import LostOutputError, tell
from paceline.metrics.metrics_file import Metrics, to_line

OnMetrics = Callable[[Metrics], bool | None]


class Sink(Protocol):
    """Takes the metrics of one run, in order."""

    name: str  # as it is called in a warning
    required: bool = True  # whether its failure ends the run

    def write(self, metrics: Metrics) -> None: ...

    def close(self) -> None:
        return


class JsonlSink(Sink):
    name = "metrics.jsonl"

    def __init__(self, path: Path, *, position: int = 0) -> None:
        """Keep the first `position` bytes of the file (0: a new run) and write on from there."""
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if (missing := missing_lines(path, position)) is not None:
            raise RunError(f"{path}: {missing}; put the file back or start a new run")
        self._file = open(path, "ab")  # noqa: SIM115 - lives as long as the run
        self._file.truncate(position)

    def write(self, metrics: Metrics) -> None:
        try:
            self._file.write(to_line(metrics).encode("utf-8"))
            self._file.flush()
        except OSError as error:
            cure = f"{make_room(error)}continue with --resume"
            raise PacelineError(f"{self._path}: cannot be written ({error.strerror}); {cure}") from error

    def position(self) -> int:
        """Length of the file in bytes, all of it on the disk by then, so that a checkpoint may rely on it."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
        self._file.close()


def missing_lines(path: Path, position: int, saved: str = "the checkpoint") -> str | None:
    """What is wrong with a file of metrics if it has not the bytes after which a checkpoint was `saved`."""
    held = path.stat().st_size if path.exists() else 0
    if held >= position:
        return None
    return f"holds {held:,} bytes, but {saved} was saved after {position:,}, so lines are missing"


class CallbackSink(Sink):
    """A function of the calling program; `stop` is called when it returns True. What it raises ends the run."""

    name = "callback"

    def __init__(self, on_metrics: OnMetrics, stop: Callable[[], None]) -> None:
        self._on_metrics, self._stop = on_metrics, stop

    def write(self, metrics: Metrics) -> None:
        if self._on_metrics(metrics) is True:
            self._stop()


class FanOut(Sink):
    name = "all sinks"

    def __init__(
        self, sinks: Iterable[Sink], warn: Callable[[str], None] = lambda line: tell(line, sys.stderr)
    ) -> None:
        self._sinks, self._warn = list(sinks), warn
        self.dropped: list[str] = []  # the message of each that failed

    def write(self, metrics: Metrics) -> None:
        self._each(lambda sink: sink.write(metrics))

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
                why = str(error) if isinstance(error, PacelineError) else f"{type(error).__name__}: {error}"
                self.dropped.append(f"{sink.name} failed and gets no more records ({why.splitlines()[0]})")
                if not isinstance(error, LostOutputError):
                    self._warn(f"warning: {self.dropped[-1]}")
