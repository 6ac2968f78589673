"""One preset's training step: its time at each batch size and window, its memory, a profile of where the time goes.

The steps are a run's own, on its own batches. After a warm-up they are queued without a pause through all windows, with
a mark after each, and the device is waited for once at the end: the host runs ahead as it does in training. Of several
ranks all take these steps together, and each has its own figures; those of rank 0 are shown.
"""

import contextlib
import gzip
import itertools
import json
import shutil
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.profiler import ProfilerActivity, profile, record_function

from paceline.core.signals import StopRequest
from paceline.core.units import BLOCK_TOKENS
from paceline.lab.bench.classes import Sizes
from paceline.lab.bench.gemm import Marks, floor_s
from paceline.lab.bench.gpu_telemetry import GpuSample, sample_gpu
from paceline.lab.bench.schedule import Point, mean_over, points_of
from paceline.lab.bench.trace import PHASE_RANGES, STEPS_RANGE, Profile, read_trace, shares, top_kernels
from paceline.metrics.memory import peak_bytes
from paceline.parallel.machine import Machine
from paceline.parallel.ranks import SINGLE_PROCESS, Ranks
from paceline.settings.run import RunConfig
from paceline.settings.schedule import schedule, tokens_before
from paceline.train.assemble import assemble_to_fit
from paceline.train.gradient_step import GradientStep
from paceline.train.loop import training_batches

WARM_UP_STEPS = 5  # one compiles, two find the allocator's final shape, after three a graph may be recorded
PROFILED_STEPS = 2
DATA_RANGE, OPTIMIZER_RANGE = PHASE_RANGES
FIGURES_OF_TIMES = ("step_s", "tokens_per_s", "mfu", "peak_gib", "peak_gib_as_timed", "sm_clock_mhz", "power_w",
                    "exposed_communication_s", "communication_share")  # fmt: skip
"""None where nothing is timed.

`peak_gib`: in micro-batches of 65,536 tokens at most, by which records are compared (a run of its own measures it where
the timed steps were larger and starts are measured); `peak_gib_as_timed`: of the timed steps. Communication, as in a
plan: what a step would not take if all exchanges took none, that is transfers that no computation hides, waiting for
slower ranks, and the cost of starting exchanges."""

EXCHANGES = ("all_reduce", "all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor",
             "reduce_scatter_single", "all_to_all_single")  # fmt: skip
"""All that ranks do together in a step, ours and torch's own shards alike; but for halos, which are pairs of sends. Of
gathers and scatters the second name is the one since torch 2.13."""


class StepTimes(NamedTuple):
    points: list[Point]
    seconds: list[list[float]]  # of each step at each point
    peak_bytes: int | None  # since the start: the allocator sees the recording of a graph, not what its replay takes
    gpu: GpuSample

    @property
    def mean_s(self) -> float:
        """Over the schedule."""
        return mean_over(self.points, [statistics.mean(each) for each in self.seconds])


class Steps:
    """A preset made ready to step. `warm_up` comes first."""

    def __init__(self, config: RunConfig, machine: Machine, ranks: Ranks = SINGLE_PROCESS) -> None:
        """`config` and `machine` as `inspect_machine` gives them; steps are cut as a run's."""
        self.run, _ = assemble_to_fit(config, machine, ranks)
        self.config, self.machine = self.run.config, self.run.machine
        self.device, self.ranks = machine.device, ranks
        self.step = GradientStep(self.run, StopRequest())
        self.schedule = [schedule(self.config, step) for step in range(config.steps)]
        sizes = {at.sequences for at in self.schedule}
        self.batches = {n: training_batches(self.run, sizes=itertools.repeat(n)) for n in sizes}

    def warm_up(self) -> None:
        for sequences in self.batches:
            first = next(at.step for at in self.schedule if at.sequences == sequences)
            for _ in range(WARM_UP_STEPS):
                self._take(first)
        self._wait()

    def times(self, *, points: int, repeats: int, exchange: bool = True) -> StepTimes:
        """`repeats` steps at each of at most `points` windows. Without exchanges the weights are spoilt."""
        chosen = points_of(self.schedule, points)
        if self.ranks.world > 1:
            dist.all_reduce(torch.zeros((), device=self.device))  # later nobody may wait for a rank that is late
            self._wait()
        with sample_gpu(self.device) as gpu, contextlib.nullcontext() if exchange else _no_communication():
            self._take(chosen[0].step)  # so that the host is ahead when the clock starts
            marks = Marks(self.device)
            for point in chosen:
                for _ in range(repeats):
                    self._take(point.step)
                    marks.set()
            seconds = marks.seconds()
        by_point = [seconds[first : first + repeats] for first in range(0, len(seconds), repeats)]
        return StepTimes(chosen, by_point, peak_bytes(str(self.device)), gpu())

    def profile(self, trace: Path | None) -> Profile:
        """PROFILED_STEPS steps at the middle of the schedule, their trace in this file. No graph is replayed again."""
        step = self.config.steps // 2
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.device.type == "cuda" else [])]
        profiler = profile(activities=activities, record_shapes=True)
        if self.step.graphs is not None:
            self.step.graphs.drop()  # kernels of a replayed graph would not show which operation launched them
        marked = record_function(OPTIMIZER_RANGE)(self.run.optimizer.step)
        with patch.object(self.run.optimizer, "step", marked), profiler:
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

    def sizes(self) -> Sizes:
        """Of one micro-batch."""
        model, share = self.config.model, self.run.largest_share
        tokens, width = share.micro_sequences * share.sequence_tokens, max(layer.mlp_width for layer in model.layers)
        return Sizes(tokens, share.sequence_tokens, model.lm_head_rows, width)

    def _take(self, step: int) -> None:
        settings = self.schedule[step]
        with record_function(DATA_RANGE):
            batch, _ = next(self.batches[settings.sequences])
        self.step.prepare(settings)
        self.step.take(settings, batch)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


class _Done:
    """The work of an exchange that was over when it began."""

    def __init__(self, received: Tensor) -> None:
        self._received = received

    def wait(self) -> bool:
        return True

    def get_future(self) -> Future[list[Tensor]]:
        future: Future[list[Tensor]] = Future()
        future.set_result([self._received])
        return future


def _at_once(*tensors: Tensor, async_op: bool = False, **named: Any) -> _Done | None:
    """In all of them what is received comes first, if it is not given by name."""
    received = tensors[0] if tensors else next(named[name] for name in ("output", "output_tensor") if name in named)
    return _Done(received) if async_op else None


@contextlib.contextmanager
def _no_communication() -> Iterator[None]:
    """While the block runs, every exchange is over at once and moves nothing: what a rank would have received is
    whatever lay there. It waits for nobody and computes as much as before, on numbers that mean nothing any more."""
    replaced: dict[str, Any] = {name: _at_once for name in EXCHANGES if hasattr(dist, name)}
    with patch.multiple(dist, **replaced, batch_isend_irecv=lambda _: []):
        yield


def _keep(source: Path, destination: Path) -> None:
    destination.parent.mkdir(parents=True, exist_ok=True)
    opener = gzip.open if destination.suffix == ".gz" else open
    with open(source, "rb") as plain, opener(destination, "wb") as file:
        shutil.copyfileobj(plain, file)


def figures_of_times(
    config: RunConfig, times: StepTimes | None, silent: StepTimes | None, peak_flops_per_s: float, ranks: int
) -> dict[str, Any]:
    """`silent`: the same steps without exchanges, if there are several ranks."""
    least_s = floor_s(config, peak_flops_per_s) / ranks
    figures = dict.fromkeys(FIGURES_OF_TIMES) | {
        "ranks": ranks, "floor_s": least_s, "peak_tflops": peak_flops_per_s / 1e12, "windows": []
    }  # fmt: skip
    if times is None:
        return figures
    peak_gib = None if times.peak_bytes is None else times.peak_bytes / 2**30
    figures |= {
        "step_s": times.mean_s,
        "tokens_per_s": tokens_before(config, config.steps) / config.steps / times.mean_s,
        "mfu": least_s / times.mean_s,
        "peak_gib": peak_gib,
        "peak_gib_as_timed": peak_gib,
        **times.gpu,
        "windows": [_window_row(*each) for each in zip(times.points, times.seconds, strict=True)],
    }
    if silent is not None:
        exposed_s = max(0.0, times.mean_s - silent.mean_s)  # noise may make it negative
        figures |= {"exposed_communication_s": exposed_s, "communication_share": exposed_s / times.mean_s}
    return figures


def _window_row(point: Point, seconds: list[float]) -> dict[str, Any]:
    return {
        "blocks": None if point.window is None else point.window / BLOCK_TOKENS,
        "tokens": point.window,
        "sequences": point.sequences,
        "steps": point.steps,
        "seconds": statistics.mean(seconds),
        "spread_s": max(seconds) - min(seconds),
    }


def figures_of_profile(profile: Profile | None, sizes: Sizes) -> dict[str, Any]:
    if profile is None:
        return {"profiled_step_s": None, "shares": None, "kernels": []}
    return {
        "profiled_step_s": profile.wall_s / PROFILED_STEPS,
        "shares": shares(profile, sizes),
        "kernels": top_kernels(profile, sizes, steps=PROFILED_STEPS),
    }
