"""One preset's training step: its time at each window, its memory, and a profile of where the time goes.

The steps are the Trainer's own, on the run's own batches. After a warm-up they are queued without a pause through all
windows, with a mark after each, and the device is waited for once at the end: the host runs ahead as it does in
training. The weights move as they would, at the rates of the step that stands for a window; no figure depends on them.
Of several ranks all take these steps together, and each has its own figures; those of the first are shown.
"""

import contextlib
import gzip
import json
import shutil
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from paceline.checkpoint.run_folder import RunFolder
from paceline.data.feed import DeviceBatch
from paceline.lab.bench.card import CardSample, sample_card
from paceline.lab.bench.classes import Sizes
from paceline.lab.bench.matmul import mark, seconds_between
from paceline.lab.bench.schedule import Point, Window, points_of
from paceline.lab.bench.silence import all_begin_together, silence
from paceline.lab.bench.trace import PHASE_RANGES, STEPS_RANGE, Profile, read_trace
from paceline.metrics.memory import peak_bytes
from paceline.metrics.meter import Meter
from paceline.metrics.sinks import JsonlSink
from paceline.parallel.ranks import ALONE, Ranks
from paceline.train.assemble import Machine
from paceline.train.config import RunConfig
from paceline.train.fit import assemble_to_fit
from paceline.train.loop import Trainer

WARM_UP_STEPS = 5
"""The first compiles, the second finds the allocator's final shape; after three a graph may be recorded."""
PROFILED_STEPS = 2
DATA_RANGE, OPTIMIZER_RANGE = PHASE_RANGES


@dataclass(frozen=True)
class WindowTime:
    """Measured at one window."""

    point: Point
    seconds: float
    """Mean of its steps."""
    spread_s: float
    """Longest minus shortest."""


@dataclass(frozen=True)
class StepTimes:
    windows: tuple[WindowTime, ...]
    peak_bytes: int | None
    """Since the start: the allocator does not see what a replayed graph takes, only its recording."""
    card: CardSample


class Steps:
    """A preset made ready to step. `warm_up` comes first."""

    def __init__(self, config: RunConfig, machine: Machine, folder: Path, ranks: Ranks = ALONE) -> None:
        """`config` and `machine` as `inspect_machine` gives them; steps are cut as a run's. `folder` is a temporary
        one: a Trainer has files, though nothing is written to them here."""
        parts = assemble_to_fit(config, machine, ranks)
        self.config, self.machine, self.device, self.ranks = parts.config, parts.machine, machine.device, ranks
        meter = Meter(free_steps=0, tokens_per_step=config.batch.tokens)
        log = JsonlSink(folder / "metrics.jsonl")
        self.trainer = Trainer(parts, RunFolder(folder), meter, log, log)
        self.batches: Iterator[DeviceBatch] = self.trainer.training_batches()
        self.windows: list[Window] = [self.trainer.window_at(step) for step in range(config.steps)]

    def warm_up(self) -> None:
        for _ in range(WARM_UP_STEPS):
            self._take(0)
        self._wait()

    def times(self, *, points: int, repeats: int) -> StepTimes:
        """`repeats` steps at each of at most `points` windows."""
        chosen = points_of(self.windows, points)
        if self.ranks.world > 1:
            all_begin_together(self.device)
        return self._timed(chosen, repeats)

    def _timed(self, chosen: list[Point], repeats: int) -> StepTimes:
        self._take(chosen[0].step)  # so that the host is ahead when the clock starts
        marks = [mark(self.device)]
        with sample_card(self.device) as card:
            for point in chosen:
                for _ in range(repeats):
                    self._take(point.step)
                    marks.append(mark(self.device))
            seconds = seconds_between(marks)
        by_point = [seconds[first : first + repeats] for first in range(0, len(seconds), repeats)]
        return StepTimes(
            windows=tuple(
                WindowTime(point, statistics.mean(each), max(each) - min(each))
                for point, each in zip(chosen, by_point, strict=True)
            ),
            peak_bytes=peak_bytes(str(self.device)),
            card=card(),
        )

    def silent_times(self, *, points: int, repeats: int) -> StepTimes | None:
        """The same without exchanges; None where there are none. The last thing to do: it spoils the weights."""
        if self.ranks.world == 1:
            return None
        all_begin_together(self.device)  # the first rank, if late, would be waited for by nobody
        with silence():
            return self._timed(points_of(self.windows, points), repeats)

    def profile(self, trace: Path | None) -> Profile:
        """PROFILED_STEPS steps at the middle of the schedule; the trace is kept in `trace` if that is given."""
        step = self.config.steps // 2
        activities = [ProfilerActivity.CPU]
        activities += [ProfilerActivity.CUDA] if self.device.type == "cuda" else []
        profiler = profile(activities=activities, record_shapes=True)
        self._launch_one_by_one()
        with _update_in_a_range(self.trainer), profiler:
            self._take(step)  # pays for what the profiler does at its first kernels
            self._wait()
            with record_function(STEPS_RANGE):
                for _ in range(PROFILED_STEPS):
                    self._take(step)
                self._wait()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(path))
            if trace is not None:
                _keep(path, trace)
            events: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8", errors="replace"))["traceEvents"]
        return read_trace(events)

    def _launch_one_by_one(self) -> None:
        """From now on no graph is replayed: its kernels would not say which operation launched them. Its memory is
        given back."""
        self.trainer.recorded = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def sizes(self) -> Sizes:
        return Sizes.of(self.config.model, self.trainer.share)

    def _take(self, step: int) -> None:
        with record_function(DATA_RANGE):
            batch = next(self.batches)
        self.trainer.window.fill_(self.trainer.window_at(step) or 0)
        self.trainer.take_step(step, batch)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


@contextlib.contextmanager
def _update_in_a_range(trainer: Trainer) -> Iterator[None]:
    """While the block runs, a trace shows the optimizer's update as OPTIMIZER_RANGE."""
    optimizer = trainer.parts.optimizer
    plain = optimizer.step

    def marked(**rates: Any) -> None:
        with record_function(OPTIMIZER_RANGE):
            plain(**rates)

    optimizer.step = marked  # type: ignore[method-assign]
    try:
        yield
    finally:
        optimizer.step = plain  # type: ignore[method-assign]


def _keep(source: Path, destination: Path) -> None:
    destination.parent.mkdir(parents=True, exist_ok=True)
    opener = gzip.open if destination.suffix == ".gz" else open
    with open(source, "rb") as plain, opener(destination, "wb") as file:
        shutil.copyfileobj(plain, file)
