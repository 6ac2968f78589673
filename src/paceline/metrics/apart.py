"""A tracker on a thread of its own, so that one that waits for a network never makes a step wait.

A run needs no tracker, and a tracker may raise, hang or fall behind at any call, its start included. Whatever happens
over there shows here as an error of the next call, on which `fan_out` drops the sink with one line. The thread is a
daemon: a call that never returns does not keep the process from ending.
"""

import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol

from paceline.core.errors import PacelineError
from paceline.metrics.records import EvalRecord, StepRecord
from paceline.metrics.scalars import scalars

ANSWER_S = 60.0
"""A call that takes longer hangs. Starting a tracker over a slow network took seconds."""
CLOSE_S = 20.0
"""For all that is left at the end. torchrun kills a run 30 s after it has asked it to stop."""
MOST_WAITING = 10_000
"""Records in memory, a few hundred bytes each; with more the tracker is too slow for this run."""


class Tracker(Protocol):
    """What a tracking library is asked to do."""

    def log(self, step: int, values: dict[str, float]) -> None: ...

    def close(self) -> None: ...


class TrackerError(PacelineError):
    """Why a tracker gets no more records."""


class Apart:
    """A sink that hands records to the tracker that `start` makes, both on its thread."""

    required = False

    def __init__(
        self,
        name: str,
        start: Callable[[], Tracker],
        *,
        answer_s: float = ANSWER_S,
        close_s: float = CLOSE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self._start, self._answer_s, self._close_s, self._clock = start, answer_s, close_s, clock
        self._waiting: queue.Queue[StepRecord | EvalRecord | None] = queue.Queue(MOST_WAITING)
        self._called: float | None = clock()  # when the call in progress began
        self._failure: BaseException | None = None
        self._ended = threading.Event()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def step(self, record: StepRecord) -> None:
        self._hand_over(record)

    def evaluation(self, record: EvalRecord) -> None:
        self._hand_over(record)

    def close(self) -> None:
        """Wait until the tracker has taken all, for a while."""
        self._hand_over(None)
        if not self._ended.wait(self._close_s):
            raise TrackerError(f"not done {self._close_s:.0f} s after the run")
        self._raise_failure()

    def _hand_over(self, record: StepRecord | EvalRecord | None) -> None:
        self._raise_failure()
        called = self._called
        if called is not None and self._clock() - called > self._answer_s:
            raise TrackerError(f"no answer for {self._answer_s:.0f} s")
        try:
            self._waiting.put_nowait(record)
        except queue.Full:
            raise TrackerError(f"{MOST_WAITING:,} records behind") from None

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise TrackerError(f"{type(self._failure).__name__}: {self._failure}") from self._failure

    def _work(self) -> None:
        try:
            tracker = self._start()
            while (record := self._next()) is not None:
                tracker.log(record.step, scalars(record))
            tracker.close()
        except BaseException as failure:  # a library may even call sys.exit; here that ends a thread
            self._failure = failure
        finally:
            self._ended.set()

    def _next(self) -> StepRecord | EvalRecord | None:
        self._called = None
        record = self._waiting.get()
        self._called = self._clock()
        return record
