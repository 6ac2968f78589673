"""The training loop. At step s: window, validation if due, end?, batch, gradient, update, record, checkpoint if due.

Step `steps` only validates. Everything that depends on the step is a pure function of it, so a resumed run needs the
weights, the optimizer's slots and a number.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from paceline.checkpoint import store
from paceline.checkpoint.run_folder import RunFolder
from paceline.core.schema import to_dict
from paceline.data.batches import Batch, Cursor, batches, nothing_counted, validation_batches, validation_windows
from paceline.data.feed import DeviceBatch, feed
from paceline.evaluate.validation import validate
from paceline.metrics.meter import Meter
from paceline.metrics.records import EvalRecord, StepRecord
from paceline.metrics.sinks import JsonlSink, Sink
from paceline.optim.schedules import cooldown_steps_of, lr_scale, muon_momentum
from paceline.parallel.gradients import Replica, replicate, zero_in_place_
from paceline.parallel.ranks import Vote
from paceline.parallel.share import place_of, share_of_batch
from paceline.train.assemble import Parts
from paceline.train.block_share import block_share
from paceline.train.instruments import measured_step
from paceline.train.recorded import EAGER_STEPS, RecordedGradient, has_room, recordable
from paceline.train.recorder import Recorder, Values
from paceline.train.step import accumulate_gradient, differentiate
from paceline.train.stop import StopRequest

GUARDED_STEPS = 5
"""Steps of a launch in which compiled code still checks its inputs, as record 16 did it."""


@dataclass(frozen=True)
class Outcome:
    """Where the loop ended."""

    steps_done: int
    evaluations: tuple[EvalRecord, ...]


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
        start: int = 0,
        evaluations: Sequence[EvalRecord] = (),
    ) -> None:
        """`log` is None on ranks that write nothing. `start` and `evaluations` are those of the run so far, if it is
        resumed, the same on every rank."""
        self.parts, self.folder, self.meter, self.log, self.sink = parts, folder, meter, log, sink
        self.config, self.start, self.ranks = parts.config, start, parts.ranks
        parts_of_sequence = self.config.parallel.split_sequence
        self.share = share_of_batch(self.config.batch, self.ranks.world, parts_of_sequence)
        self.place = place_of(self.ranks.rank, self.ranks.world, parts_of_sequence)
        self.replica = replicate(parts.forward, self.ranks, self.config.parallel, parts.tables)  # ends with this object
        self.recorder = Recorder(sink)
        self.evaluations = list(evaluations)
        window_device = "cpu" if parts.machine.back_ends.window_on_host else parts.machine.device
        self.window = torch.zeros((), dtype=torch.int32, device=window_device)
        self.recorded: RecordedGradient | None = None
        self.steps_before_recording = EAGER_STEPS if self._recordable() else None

    def run(self, stop: StopRequest, on_evaluation: Callable[[EvalRecord], None]) -> Outcome:
        data, agreed = self.training_batches(), Vote(self.ranks)
        for step in range(self.start, self.config.steps + 1):
            self.meter.begin_step(step)
            self.window.fill_(self.window_at(step) or 0)
            stopping = agreed(bool(stop))
            if self._evaluation_due(step) and not stopping:
                on_evaluation(self.evaluate(step))
                stopping = agreed(bool(stop))
            if step == self.config.steps or stopping or step - self.start == self.config.train.stop_after:
                break
            values = self.take_step(step, next(data))
            self.meter.end_step()
            if self._record_due(step + 1):
                self._record(step, values)
            if self._checkpoint_due(step + 1):
                self.save(step + 1)
        self.recorder.flush()
        if step > self.start or self.start == 0:  # else there is one of this step; the same answer on every rank
            self.save(step)
        return Outcome(step, tuple(self.evaluations))

    def window_at(self, step: int) -> int | None:
        """Window in tokens; None if the preset has none."""
        window = self.config.model.window
        return None if window.unit == "none" else window.tokens_at(step, self.config.steps)

    def lr_scale_at(self, step: int) -> float:
        schedule, steps = self.config.optim.schedule, self.config.steps
        return lr_scale(step, steps=steps, cooldown_steps=cooldown_steps_of(schedule, steps), floor=schedule.floor)

    def evaluate(self, step: int) -> EvalRecord:
        with self.meter.paused():
            self.recorder.flush()
            tokenizer = self.parts.tokenizer
            token_bytes = None if tokenizer is None else tokenizer.token_byte_lengths()
            result = validate(
                self.parts.forward,
                self._validation_batches(),
                self.window,
                token_bytes,
                self.ranks,
                device=self.parts.machine.device,
            )
            extra = self._mask_facts()
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

    def _validation_batches(self) -> Iterator[Batch]:
        """This rank's; where no rank can make a pass alone, all have as many, some of them with nothing that counts."""
        b, e, place, made = self.config.batch, self.config.evaluate, self.place, 0
        windows = validation_windows(self.parts.data.val, b.sequence_tokens, e.tokens)
        for batch in validation_batches(
            self.parts.data.val,
            b.sequence_tokens,
            e.tokens,
            self.share.micro_sequences,
            rank=place.run,
            world=place.runs,
        ):
            yield place.cut(batch)
            made += 1
        if self.parts.tables.passes_together:
            most = math.ceil(len(windows) / place.runs)
            for _ in range(made, math.ceil(most / self.share.micro_sequences)):
                yield nothing_counted(self.share.sequence_tokens)

    def _mask_facts(self) -> dict[str, float]:
        """What the mask of the first validation batch looks like at this window."""
        b, e = self.config.batch, self.config.evaluate
        first = next(validation_batches(self.parts.data.val, b.sequence_tokens, e.tokens, b.micro_sequences))
        tokens = torch.from_numpy(first.tokens).to(self.window.device)
        share = block_share(self.config.model, tokens, self.window, end_of_text=self.config.data.end_of_text)
        return {} if share is None else {"full_block_share": float(share)}

    def save(self, step: int) -> None:
        """Leave a checkpoint, if this rank writes; the others wait for it at their next exchange."""
        with self.meter.paused():
            self.recorder.flush()
            writes = self.log is not None
            model = self.parts.tables.whole_weights(self.parts.model, wanted=writes)  # both with all ranks' help
            optimizer = self.parts.optimizer.state_dict(wanted=writes)
            if self.log is None:
                return
            state = {
                "cursor": {"step": step},
                "metrics_bytes": self.log.position(),
                "clocks": to_dict(self.meter.state()),
            }
            checkpoint = store.Checkpoint(step, model, optimizer, state)
            store.save(self.folder, checkpoint, keep=self.config.checkpoint.keep)

    def training_batches(self) -> Iterator[DeviceBatch]:
        c, place, start = self.config, self.place, Cursor(step=self.start)
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
            values = {"train_loss": gradient()}
            self.parts.optimizer.step(**rates)
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

    def _gradient(self, step: int, batch: DeviceBatch) -> Tensor:
        """Compute it; the mean loss of the global batch where it will be recorded, else this rank's share of it."""
        self._record_gradient(batch)
        with self._guards(step):
            loss = accumulate_gradient(
                self.replica,
                batch,
                self.window,
                micro_sequences=self.share.micro_sequences,
                padded=self.config.data.align_documents,
                ranks=self.ranks,
                differentiate=self.recorded or differentiate,
            )
        return self.ranks.sum_(loss) if self._record_due(step + 1) else loss

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
