"""The two clocks of a run, and the rates taken from them.

Train time follows the records' rule: it starts at the top of step `untimed_steps` (compilation and warm-up are free)
and stands still during validation and checkpointing. Wall time starts with the process. A resumed run adds to both.
"""

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

RATE_STEPS = 20  # over which the current rate is taken: few enough to follow the window's growth, enough to be calm
LAUNCH_VARIABLE = "PACELINE_LAUNCHED"  # epoch seconds of the command that started this process; a launcher sets it


@dataclass(frozen=True, kw_only=True)
class MeterState:
    """What a checkpoint keeps of the clocks."""

    train_s: float = 0.0
    wall_s: float = 0.0
    timed_steps: int = 0
    timed_tokens: int | None = None  # None: written by a version whose steps all had the same number of tokens
    startup_s: float | None = None
    first_steps_s: float | None = None


class Meter:
    """Call `begin_step` at the top of every step, `end_step` after its update, `stop` after the last one."""

    def __init__(
        self,
        *,
        untimed_steps: int,
        resumed: MeterState | None = None,
        already_s: float = 0.0,
        wait: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`already_s`: age of the process (`seconds_since_launch()`). `wait`: waits for the device; called before the
        train clock starts, stands still or is read at the end, so that queued work is counted where it belongs."""
        self._untimed_steps = untimed_steps
        self._wait, self._clock = wait, clock
        self._before = resumed or MeterState()
        self._launched = clock() - already_s
        self._loop_started: float | None = None
        self._paused_s = 0.0
        self._pause_began: float | None = None
        self._stopped_s: float | None = None  # busy seconds at the end
        self._train_from: float | None = None  # busy seconds at which the train clock started
        self._timed_steps, self._timed_tokens = self._before.timed_steps, self._before.timed_tokens or 0
        self.startup_s = self._before.startup_s  # launch to first step: imports, data, model; None until then
        self.first_steps_s = self._before.first_steps_s  # the untimed ones, pauses left out; None until they are done
        self._recent: deque[tuple[float, int]] = deque(maxlen=RATE_STEPS + 1)  # busy seconds, tokens so far
        self._tokens = 0

    def begin_step(self, step: int) -> None:
        """The top of step `step`, before its validation. Step number `steps` (the last validation) counts too."""
        if self._loop_started is None:
            self._loop_started, self._paused_s = self._clock(), 0.0
            self._recent.append((0.0, 0))
            if self.startup_s is None:
                self.startup_s = self._loop_started - self._launched
        if self._train_from is None and step >= self._untimed_steps:
            self._wait()
            self._train_from = self._busy_s()
            if self.first_steps_s is None:
                self.first_steps_s = self._train_from

    def end_step(self, tokens: int) -> None:
        """The update, by so many tokens, is done, or queued on the device."""
        self._tokens += tokens
        self._recent.append((self._busy_s(), self._tokens))
        if self._train_from is not None:
            self._timed_steps, self._timed_tokens = self._timed_steps + 1, self._timed_tokens + tokens

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Validation or checkpointing: waits for the device, then the train clock stands still."""
        self._wait()
        self._pause_began = began = self._clock()
        try:
            yield
        finally:
            self._wait()
            self._pause_began = None
            self._paused_s += self._clock() - began

    def stop(self) -> None:
        """No step follows: waiting for the last checkpoint is no training."""
        self._wait()
        self._stopped_s = self._busy_s()

    @property
    def train_s(self) -> float:
        started = self._train_from
        return self._before.train_s + (0.0 if started is None else self._busy_s() - started)

    @property
    def wall_s(self) -> float:
        return self._before.wall_s + self._clock() - self._launched

    @property
    def tokens_per_s(self) -> float | None:
        """Rate of the last steps, pauses left out; None before the second step of this launch."""
        if len(self._recent) < 2 or self._recent[-1][0] <= self._recent[0][0]:
            return None
        (first_s, first), (last_s, last) = self._recent[0], self._recent[-1]
        return (last - first) / (last_s - first_s)

    @property
    def mean_tokens_per_s(self) -> float | None:
        """Rate over every timed step; where all steps were free, that of the last ones."""
        if self._timed_steps and self.train_s > 0:
            return self._timed_tokens / self.train_s
        return self.tokens_per_s

    def state(self) -> MeterState:
        return MeterState(
            train_s=self.train_s,
            wall_s=self.wall_s,
            timed_steps=self._timed_steps,
            timed_tokens=self._timed_tokens,
            startup_s=self.startup_s,
            first_steps_s=self.first_steps_s,
        )

    def _busy_s(self) -> float:
        """Seconds in the loop of this launch, pauses left out. It can be read during a pause."""
        if self._stopped_s is not None:
            return self._stopped_s
        if self._loop_started is None:
            return 0.0
        now = self._clock() if self._pause_began is None else self._pause_began
        return now - self._loop_started - self._paused_s


def seconds_since_launch() -> float:
    """By $PACELINE_LAUNCHED, else the age of this process where the system tells it (Linux), else 0."""
    try:
        if named := os.environ.get(LAUNCH_VARIABLE):
            return max(0.0, time.time() - float(named))
        with open("/proc/self/stat") as file:
            after_name = file.read().rpartition(")")[2].split()  # the name may hold spaces; field 3 comes first here
        started_s = int(after_name[22 - 3]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started_s)
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
