"""TensorBoard, Weights & Biases and trackio: each by one flag, none needed, each on a thread of its own.

A tracker may raise, hang or fall behind at any call, its import and start included. Its failure is raised by the sink's
next call, on which `FanOut` drops the sink with one line; no step waits for a network, and no call that never returns
keeps the process from ending. A resumed run goes on in the same place; steps that are made again have the bits they
had, so online trackers may keep the first value of each.
"""

import hashlib
import importlib
import importlib.util
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from paceline.core.errors import ConfigError, PacelineError
from paceline.metrics.metrics_file import Metrics, StepMetrics
from paceline.settings.run import MetricsConfig

TENSORBOARD_FOLDER = "tensorboard"
ANSWER_S = 60.0  # a call that takes longer hangs. Starting a tracker over a slow network took seconds.
CLOSE_S = 20.0  # for all that is left at the end. torchrun kills a run 30 s after it has asked it to stop.
MOST_WAITING = 10_000  # metrics in memory, a few hundred bytes each; with more the tracker is too slow for this run


def scalars(metrics: Metrics) -> dict[str, float]:
    """Name to number, the same names for all trackers. What is not known, or not finite, is left out."""
    if isinstance(metrics, StepMetrics):
        names = ("lr_scale", "window_tokens", "tokens", "tokens_per_s")
        own = {"loss": metrics.train_loss, **{name: getattr(metrics, name) for name in names}}
        side, clocks = "train", {"time/train_s": metrics.train_s, "time/wall_s": metrics.wall_s}
    else:
        own = {"loss": metrics.val_loss, "bits_per_byte": metrics.val_bpb}
        side, clocks = "val", {}
    named = {**clocks, **{f"{side}/{name}": value for name, value in {**own, **metrics.extra}.items()}}
    return {name: float(value) for name, value in named.items() if type(value) in (int, float) and math.isfinite(value)}


@dataclass(frozen=True, kw_only=True)
class Tracked:
    folder: Path
    name: str
    started: str  # date and time of the first launch
    start_step: int
    settings: Mapping[str, Any]

    @property
    def id(self) -> str:
        """The same for every launch of a run, and no other run's."""
        return hashlib.blake2b(f"{self.name} {self.started}".encode(), digest_size=8).hexdigest()


class Tracker(NamedTuple):
    log: Callable[[int, dict[str, float]], object]
    close: Callable[[], object]


def tensorboard(run: Tracked) -> Tracker:
    from torch.utils.tensorboard import SummaryWriter

    # what a killed launch wrote after its last checkpoint is hidden; the step of metrics counts updates done
    first = run.start_step + 1 if run.start_step else None
    writer = SummaryWriter(str(run.folder / TENSORBOARD_FOLDER), purge_step=first)

    def log(step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return Tracker(log, writer.close)


def online(library: str, run: Tracked, **options: Any) -> Tracker:
    """A run of wandb or trackio, by the name of the library and the arguments of its `init`."""
    module = importlib.import_module(library)
    if library == "wandb":
        options["settings"] = module.Settings(console="off", silent=True)  # the console is ours
    opened = module.init(config=dict(run.settings), resume="allow", **options)
    return Tracker(lambda step, values: opened.log(values, step=step), opened.finish)


class BackgroundTracker:
    """A sink that passes metrics to the tracker that `start` makes, both on its thread."""

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
        self._waiting: queue.Queue[Metrics | None] = queue.Queue(MOST_WAITING)
        self._called: float | None = clock()  # when the call in progress began
        self._failure: BaseException | None = None
        self._ended = threading.Event()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def write(self, metrics: Metrics | None) -> None:
        """Queue the metrics; None ends the thread."""
        self._raise_failure()
        called = self._called
        if called is not None and self._clock() - called > self._answer_s:
            raise PacelineError(f"no answer for {self._answer_s:.0f} s")
        try:
            self._waiting.put_nowait(metrics)
        except queue.Full:
            raise PacelineError(f"{MOST_WAITING:,} records behind") from None

    def close(self) -> None:
        """Wait until the tracker has taken all, for a while."""
        self.write(None)
        if not self._ended.wait(self._close_s):
            raise PacelineError(f"not done {self._close_s:.0f} s after the run")
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise PacelineError(f"{type(self._failure).__name__}: {self._failure}") from self._failure

    def _work(self) -> None:
        try:
            tracker = self._start()
            while (metrics := self._next()) is not None:
                tracker.log(metrics.step, scalars(metrics))
            tracker.close()
        except BaseException as failure:  # a library may even call sys.exit; here that ends a thread
            self._failure = failure
        finally:
            self._ended.set()

    def _next(self) -> Metrics | None:
        self._called = None
        metrics = self._waiting.get()
        self._called = self._clock()
        return metrics


def check_installed(config: MetricsConfig) -> None:
    for package, extra in (("tensorboard", "tb"), ("wandb", "wandb"), ("trackio", "trackio")):
        if getattr(config, package) not in (None, False) and importlib.util.find_spec(package) is None:
            raise ConfigError(f"--metrics.{package} needs {package}; pip install 'paceline[{extra}]'")


def trackers(config: MetricsConfig, run: Tracked) -> Iterator[BackgroundTracker]:
    if config.tensorboard:
        yield BackgroundTracker("tensorboard", lambda: tensorboard(run))
    if config.wandb is not None:
        own = {"project": config.wandb, "name": run.name, "id": run.id, "dir": str(run.folder)}
        yield BackgroundTracker("wandb", lambda: online("wandb", run, **own))
    if config.trackio is not None:  # it knows runs by their names, so the id is part of it
        named = {"project": config.trackio, "name": f"{run.name}-{run.id[:6]}"}
        yield BackgroundTracker("trackio", lambda: online("trackio", run, **named))
