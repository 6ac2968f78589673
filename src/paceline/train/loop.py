"""The training loop. At step s: window, validation if due, end?, batch, gradient, update, record, checkpoint if due.

Step `steps` only validates. Everything that depends on the step is a pure function of it, so a resumed run needs the
weights, the optimizer's slots and two numbers: the step, and that of its data, which is another after a rewind.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint import store
from paceline.checkpoint.random_states import of_all_ranks, random_states
from paceline.checkpoint.run_folder import RunFolder
from paceline.checkpoint.saver import Saver
from paceline.core.schema import to_dict
from paceline.data.batches import Batch, Cursor, batches, nothing_counted, validation_batches
from paceline.data.feed import DeviceBatch, feed
from paceline.evaluate.validation import Validation, validate
from paceline.metrics.meter import Meter, MeterState
from paceline.metrics.records import EvalRecord, StepRecord
from paceline.metrics.sinks import JsonlSink, Sink
from paceline.optim.schedules import cooldown_steps_of, lr_scale, muon_momentum
from paceline.parallel.gradients import Replica, replicate, zero_in_place_
from paceline.parallel.ranks import Vote
from paceline.parallel.share import place_of, share_of_batch
from paceline.train.assemble import Parts
from paceline.train.block_share import block_share
from paceline.train.guard import Guard
from paceline.train.instruments import measured_step
from paceline.train.recorded import EAGER_STEPS, RecordedGradient, has_room, recordable
from paceline.train.recorder import Recorder, Values
from paceline.train.step import accumulate_gradient, differentiate
from paceline.train.stop import Interrupted, StopRequest

GUARDED_STEPS = 5
"""Steps of a launch in which compiled code still checks its inputs, as record 16 did it."""


@dataclass(frozen=True)
class Outcome:
    """Where the loop ended."""

    steps_done: int
    evaluations: tuple[EvalRecord, ...]
    skipped_steps: int


@dataclass(frozen=True, kw_only=True)
class SavedState:
    """What a checkpoint keeps besides tensors and config."""

    cursor: Cursor
    """The data that comes next."""
    metrics_bytes: int
    """Length of the metrics file by then."""
    clocks: MeterState


@dataclass(frozen=True)
class Position:
    """Where a run goes on."""

    step: int = 0
    data_step: int = 0
    """The step whose batch comes next."""
    metrics_bytes: int = 0
    clocks: MeterState | None = None
    guard: Mapping[str, Tensor] = field(default_factory=dict)
    rewound: bool = False
    """Checkpoints after this one are left behind, and its data, too."""


BEGINNING = Position()


class Trainer:
    """One run: its parts, its folder, its clocks. `run` is the loop; the rest is what the loop names."""

    def __init__(
        self,
        parts: Parts,
        folder: RunFolder,
        meter: Meter,
        log: JsonlSink | None,
        sink: Sink,
        *,
        position: Position = BEGINNING,
        evaluations: Sequence[EvalRecord] = (),
        asked: Mapping[str, Any] | None = None,
        stop: StopRequest | None = None,
    ) -> None:
        """`log` is None on ranks that write nothing. `position` and `evaluations` are those of the run so far, if it is
        resumed, the same on every rank. `asked` is the config as checkpoints keep it."""
        self.parts, self.folder, self.meter, self.log, self.sink = parts, folder, meter, log, sink
        self.config, self.position, self.ranks = parts.config, position, parts.ranks
        self.start, self.asked, self.stop = position.step, asked, StopRequest() if stop is None else stop
        self.saver = Saver(folder, keep=self.config.checkpoint.keep, writes=log is not None)
        self.saved_step = position.step if position.step else None
        parts_of_sequence = self.config.parallel.split_sequence
        self.share = share_of_batch(self.config.batch, self.ranks.world, parts_of_sequence)
        self.place = place_of(self.ranks.rank, self.ranks.world, parts_of_sequence)
        self.replica = replicate(parts.forward, self.ranks, self.config.parallel, parts.tables)  # ends with this object
        self.guard = Guard(self.config.guard, dict(parts.model.named_parameters()), parts.tables, self.ranks)
        self.guard.load(position.guard)
        self.recorder = Recorder(sink)
        self.evaluations = list(evaluations)
        window_device = "cpu" if parts.machine.back_ends.window_on_host else parts.machine.device
        self.window = torch.zeros((), dtype=torch.int32, device=window_device)
        self.recorded: RecordedGradient | None = None
        self.steps_before_recording = EAGER_STEPS if self._recordable() else None

    def run(self, on_evaluation: Callable[[EvalRecord], None]) -> Outcome:
        """Train to the end, or until asked to stop. Leaves a checkpoint of where that was."""
        with self.saver:
            self._settle_in()
            step = self._loop(on_evaluation)
            self.meter.stop()
            self.recorder.flush()
            if step != self.saved_step:  # the same answer on every rank
                self.save(step)
        self.guard.wait()
        return Outcome(step, tuple(self.evaluations), self.guard.skipped)

    def _settle_in(self) -> None:
        """Before the first step: no checkpoint that a later launch would take for this run's newest; and of several
        ranks, which hear no signal while they compile, one to come back to."""
        if self.position.rewound:
            self.save(self.start)
            self.saver.wait()  # on the disk, before those after it go away
        if self.ranks.first:
            store.set_aside_after(self.folder, self.start)
        if self.config.train.compile and self.start == 0 and self.ranks.world > 1:
            self.save(self.start)

    def _loop(self, on_evaluation: Callable[[EvalRecord], None]) -> int:
        """Returns the step that it came to, whose update is not made."""
        data, agreed, step = self.training_batches(), Vote(self.ranks), self.start
        with contextlib.suppress(Interrupted):  # which comes where nothing has changed since the top of the step
            for step in range(self.start, self.config.steps + 1):
                self.meter.begin_step(step)
                self.window.fill_(self.window_at(step) or 0)
                stopping = agreed(self._ending())
                if self._evaluation_due(step) and not stopping:
                    if (record := self.evaluate(step, agreed)) is not None:
                        on_evaluation(record)
                    stopping = agreed(self._ending())
                if step == self.config.steps or stopping or step - self.start == self.config.train.stop_after:
                    break
                values = self.take_step(step, next(data))
                self.meter.end_step()
                if self._record_due(step + 1):
                    self._record(step, values)
                if self._checkpoint_due(step + 1):
                    self.save(step + 1)
        return step

    def _ending(self) -> bool:
        """Whether this rank wishes to stop, as far as it knows without waiting. It speaks of skipped steps here."""
        self.saver.check()
        if (line := self.guard.news()) is not None and self.ranks.first:
            print(line, flush=True)
        return bool(self.stop) or self.guard.exhausted

    def window_at(self, step: int) -> int | None:
        """Window in tokens; None if the preset has none."""
        window = self.config.model.window
        return None if window.unit == "none" else window.tokens_at(step, self.config.steps)

    def lr_scale_at(self, step: int) -> float:
        schedule, steps = self.config.optim.schedule, self.config.steps
        return lr_scale(step, steps=steps, cooldown_steps=cooldown_steps_of(schedule, steps), floor=schedule.floor)

    def evaluate(self, step: int, agreed: Vote) -> EvalRecord | None:
        """None: it was given up, because the run is to end."""
        with self.meter.paused():
            self.recorder.flush()
            with self._droppable():
                result = self._validated(agreed)
                extra = self._mask_facts()
        if result is None:
            return None
        record = EvalRecord(
            step=step,
            val_loss=result.loss,
            val_bpb=result.bits_per_byte,
            tokens=step * self.config.batch.tokens,
            train_s=self.meter.train_s,
            wall_s=self.meter.wall_s,
            window_tokens=self.window_at(step),
            extra=extra,
        )
        self.evaluations.append(record)
        self.sink.evaluation(record)
        return record

    def _validated(self, agreed: Vote) -> Validation | None:
        tokenizer = self.parts.tokenizer
        return validate(
            self.parts.forward,
            self._validation_batches(),
            self.window,
            None if tokenizer is None else tokenizer.token_byte_lengths(),
            self.ranks,
            device=self.parts.machine.device,
            give_up=lambda: agreed(self._ending()),
        )

    def _validation_batches(self) -> Iterator[Batch]:
        """This rank's; where no rank can make a pass alone, an empty one is a sequence of which nothing counts."""
        b, e, place = self.config.batch, self.config.evaluate, self.place
        for batch in validation_batches(
            self.parts.data.val,
            b.sequence_tokens,
            e.tokens,
            self.share.micro_sequences,
            rank=place.run,
            world=place.runs,
        ):
            empty = not batch.targets.size
            filled_up = empty and self.parts.tables.passes_together
            yield nothing_counted(self.share.sequence_tokens) if filled_up else place.cut(batch)

    def _mask_facts(self) -> dict[str, float]:
        """What the mask of the first validation batch looks like at this window."""
        b, e = self.config.batch, self.config.evaluate
        first = next(validation_batches(self.parts.data.val, b.sequence_tokens, e.tokens, b.micro_sequences))
        tokens = torch.from_numpy(first.tokens).to(self.window.device)
        share = block_share(self.config.model, tokens, self.window, end_of_text=self.config.data.end_of_text)
        return {} if share is None else {"full_block_share": float(share)}

    def save(self, step: int) -> None:
        """Begin to leave a checkpoint, with all ranks' help; the first one's thread writes it."""
        with self.meter.paused():
            self.recorder.flush()
            self.saver.save(
                store.Checkpoint(
                    step,
                    model=dict(self.parts.model.named_parameters()),
                    optimizer=self.parts.optimizer.state_dict(wanted=self.log is not None, copied=False),
                    state=to_dict(self._state(step)),
                    random=of_all_ranks(self.ranks.to_first(random_states())),
                    guard=self.guard.state(),
                    config=self.asked,
                )
            )
        self.saved_step = step

    def _state(self, step: int) -> SavedState:
        written = 0 if self.log is None else self.log.position()
        return SavedState(cursor=Cursor(self.data_step_of(step)), metrics_bytes=written, clocks=self.meter.state())

    def data_step_of(self, step: int) -> int:
        """The step whose batch a fresh run would read there: another after a rewind, which leaves data out."""
        return step + self.position.data_step - self.position.step

    def training_batches(self) -> Iterator[DeviceBatch]:
        c, place, start = self.config, self.place, Cursor(step=self.position.data_step)
        source = batches(
            self.parts.data.train, c.data, c.batch, seed=c.seed, start=start, rank=place.run, world=place.runs
        )
        own = ((place.cut(batch), cursor) for batch, cursor in source)
        return (batch for batch, _ in feed(own, self.parts.machine.device))

    def _guards(self, step: int) -> AbstractContextManager[object]:
        """Under `train.skip_guards`, compiled code is trusted to fit its inputs once it has run a few steps."""
        trusted = self.config.train.skip_guards and step - self.start >= GUARDED_STEPS
        return torch.compiler.set_stance(skip_guard_eval_unsafe=True) if trusted else contextlib.nullcontext()

    def take_step(self, step: int, batch: DeviceBatch) -> Values:
        """Gradient and update, at the window that `self.window` holds."""
        gradient, rates = partial(self._gradient, step, batch), self._rates(step)
        if self.config.metrics.instruments and self._record_due(step + 1):
            values = measured_step(self.parts, batch, self.window, gradient, **rates)
        else:
            loss, skip = gradient()
            values = {"train_loss": loss}
            self.parts.optimizer.step(**rates, skip=skip)
        self._forget_gradients()
        return values

    def _recordable(self) -> bool:
        machine = self.parts.machine
        why_not = recordable(
            self.config,
            device=machine.device.type,
            world=self.ranks.world,
            window_on_host=machine.back_ends.window_on_host,
        )
        return why_not is None

    def _record_gradient(self, batch: DeviceBatch) -> None:
        """After the first steps, once, if there is room for it."""
        if self.steps_before_recording is None:
            return
        if self.steps_before_recording > 0:
            self.steps_before_recording -= 1
            return
        self.steps_before_recording = None
        if has_room(self.config.train.memory_limit_gib):
            n, parameters = self.share.micro_sequences, self.parts.model.parameters()
            like = DeviceBatch(batch.tokens[:n], batch.targets[:n])
            self.recorded = RecordedGradient(self.replica, parameters, like, self.window)

    def _forget_gradients(self) -> None:
        views = isinstance(self.replica, Replica) and self.config.parallel.bucket_views
        if self.recorded or (views and self.share.sequences > self.share.micro_sequences):
            zero_in_place_(self.parts.model.parameters())
        else:  # None: the first micro-batch writes its gradient and need not add it
            self.parts.optimizer.zero_grad()

    def _droppable(self) -> AbstractContextManager[None]:
        """Around what changes nothing: a signal ends it at once, unless other ranks would wait for this one."""
        return self.stop.droppable(self.ranks.world == 1)

    def _gradient(self, step: int, batch: DeviceBatch) -> tuple[Tensor, Tensor | None]:
        """Compute it. The mean loss of the global batch, or only this rank's share of it where nobody will look at it;
        and whether the step is to be skipped, if it is guarded."""
        self._record_gradient(batch)  # not to be dropped: a recording must be ended, and takes no longer than a step
        with self._guards(step), self._droppable():
            loss = accumulate_gradient(
                self.replica,
                batch,
                self.window,
                micro_sequences=self.share.micro_sequences,
                padded=self.config.data.align_documents,
                ranks=self.ranks,
                differentiate=self.recorded or differentiate,
            )
        if self.config.guard.skip:
            verdict = self.guard.judge(step, loss)
            return verdict.loss, verdict.skip
        return self.ranks.sum_(loss) if self._record_due(step + 1) else loss, None

    def _rates(self, step: int) -> dict[str, float]:
        return {"lr_scale": self.lr_scale_at(step), "momentum": muon_momentum(step, self.config.optim.muon)}

    def _record_due(self, done: int) -> bool:
        return done % self.config.metrics.every == 0 or done == self.config.steps

    def _record(self, step: int, values: Values) -> None:
        done = step + 1
        record = StepRecord(
            step=done,
            train_loss=None,
            lr_scale=self.lr_scale_at(step),
            window_tokens=self.window_at(step),
            tokens=done * self.config.batch.tokens,
            train_s=self.meter.train_s,
            wall_s=self.meter.wall_s,
            tokens_per_s=self.meter.tokens_per_s,
        )
        self.recorder.step(record, values)

    def _evaluation_due(self, step: int) -> bool:
        every = self.config.evaluate.every
        if self.evaluations and self.evaluations[-1].step == step:  # made before this run was interrupted
            return False
        return step == self.config.steps or (every is not None and step % every == 0)

    def _checkpoint_due(self, done: int) -> bool:
        every = self.config.checkpoint.every
        return every is not None and done % every == 0 and done != self.config.steps
