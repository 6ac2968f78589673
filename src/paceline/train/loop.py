"""The training loop. At step s: settings, hooks, end?, batch, gradient and update, hooks.

Step `steps` only validates. All that depends on the step is a pure function of it (`settings/schedule.py`), so a run
goes on from weights, slots, the states of its hooks, the step and the position in the data.
"""

import contextlib
import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from paceline.core.signals import Interrupted, StopRequest
from paceline.data.batches import Cursor, batches
from paceline.data.corpus import Batch
from paceline.data.feed import DeviceBatch, feed
from paceline.metrics.card import InitFrom
from paceline.metrics.deferred import Values
from paceline.metrics.meter import Meter, MeterState
from paceline.metrics.metrics_file import EvalMetrics
from paceline.parallel.ranks import DeferredAny
from paceline.settings.schedule import (
    StepSettings,
    candidates_at,
    fewest_candidates,
    schedule,
    sequences_from,
    tokens_before,
)
from paceline.train.assemble import Assembly

if TYPE_CHECKING:
    from paceline.train.gradient_step import GradientStep


@dataclass(frozen=True, kw_only=True)
class History:
    """What a run has behind it that its steps do not show."""

    data: tuple[str, ...] = ()  # fingerprints of the training data, in order; empty in older versions' files
    val_data: tuple[str, ...] = ()  # the same of the validation data
    rewinds: int = 0
    restarts: int = 0
    tokens: int = 0  # read in steps that rewinds and restarts have left behind
    init_from: InitFrom | None = None
    extended: tuple[tuple[int, ...], ...] = ()  # as the card has them


@dataclass(frozen=True)
class Position:
    """Where a run goes on."""

    step: int = 0
    cursor: Cursor = field(default_factory=Cursor)  # the data that comes next
    metrics_bytes: int = 0
    clocks: MeterState | None = None
    states: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)  # of the hooks, by name
    rewound: bool = False  # checkpoints after this one are left behind, and its data, too
    history: History = field(default_factory=History)


BEGINNING = Position()


class Hook:
    """Between steps; this one does nothing."""

    name = ""  # of its group in every checkpoint; empty: it has no state

    def before_step(self, settings: StepSettings) -> bool:
        """At the top of every step and of step `steps`. True: it took long, so whether to stop is asked again."""
        return False

    def after_step(self, settings: StepSettings, values: Values) -> None:
        """The update is made, or queued on the device."""

    def wants_stop(self) -> bool:
        """Whether the run should end, as far as this rank knows without waiting."""
        return False

    def state(self) -> dict[str, Tensor]:
        return {}

    def load(self, state: Mapping[str, Tensor]) -> None: ...


class Loop:
    """One launch of a run. `hooks` are called in their order."""

    def __init__(
        self, run: Assembly, gradient: "GradientStep", meter: Meter, stop: StopRequest, position: Position = BEGINNING
    ) -> None:
        self.run, self.gradient, self.meter, self.stop, self.position = run, gradient, meter, stop, position
        self.hooks: Sequence[Hook] = ()
        self.cursor = position.cursor  # where the data of the next step begin
        self.recent: deque[tuple[int, Cursor]] = deque(maxlen=64)  # the last steps and where their data began
        self.evaluations: list[EvalMetrics] = []  # the validations so far
        self.any_rank = DeferredAny(run.ranks)

    def __call__(self) -> int:
        """Train to the end, or until asked to stop. Returns the step that it came to, whose update is not made."""
        config, start = self.run.config, self.position.step
        if config.stages and config.train.compile:
            from paceline.train.compile_ahead import compile_ahead

            compile_ahead(self.gradient, start)
        data, step = training_batches(self.run, self.position), start
        with contextlib.suppress(Interrupted):  # which comes where nothing has changed since the top of the step
            for step in range(start, config.steps + 1):
                self.meter.begin_step(step)
                settings = schedule(config, step)
                self.gradient.prepare(settings)
                stopping = self.stopping()
                if not stopping and sum(hook.before_step(settings) for hook in self.hooks):  # all of them are called
                    stopping = self.stopping()
                if step == config.steps or stopping or step - start == config.train.stop_after:
                    break
                batch, after = next(data)
                self.recent.append((step, self.cursor))
                measure = config.metrics.diagnostics and metrics_due(config.metrics.every, step + 1, config.steps)
                values = self.gradient.take(settings, batch, measure=measure)
                self.cursor = after
                self.meter.end_step(settings.sequences * config.batch.sequence_tokens)
                for hook in self.hooks:
                    hook.after_step(settings, values)
        return step

    def tokens_after(self, step: int) -> int:
        """Training tokens read by then, those of steps that the run has left behind included."""
        return tokens_before(self.run.config, step) + self.position.history.tokens

    def stopping(self) -> bool:
        """Whether any rank wants to stop, the same answer on all of them."""
        return self.any_rank(sum(hook.wants_stop() for hook in self.hooks) > 0 or bool(self.stop))


def metrics_due(every: int, done: int, steps: int) -> bool:
    return done % every == 0 or done == steps


def training_batches(
    run: Assembly, position: Position = BEGINNING, sizes: Iterable[int] | None = None
) -> Iterator[tuple[DeviceBatch, Cursor]]:
    """This rank's batches on its device, each with the cursor after it; of these sizes, or as the schedule says."""
    c, place, start = run.config, run.place, position.step
    source = batches(
        run.data.train,
        c.data,
        c.batch,
        sequences_from(c, start) if sizes is None else sizes,
        seed=c.seed,
        start=position.cursor,
        rank=place.run,
        world=place.runs,
    )
    if c.model.candidates is not None:
        in_turn = (candidates_at(c, step) if step < c.steps else 0 for step in itertools.count(start))
        source = _with_candidates(source, itertools.repeat(fewest_candidates(c)) if sizes else in_turn)
    return feed(((place.cut(batch), cursor) for batch, cursor in source), run.machine.device)


def _with_candidates(source: Iterator[tuple[Batch, Cursor]], counts: Iterator[int]) -> Iterator[tuple[Batch, Cursor]]:
    """The same batches, each looked at before it is trained on: does the sampled softmax hold its targets?"""
    from paceline.model.sampled import check_candidates

    for (batch, cursor), count in zip(source, counts, strict=False):
        check_candidates(batch.targets, count)
        yield batch, cursor
