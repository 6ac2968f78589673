"""What happens between steps: metrics, validation, checkpoints. `bad_steps.py` and `average.py` are hooks, too."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.run_folder import RunFolder
from paceline.checkpoint.save import Checkpoint, Saver, set_aside_after
from paceline.core.random_states import of_all_ranks, random_states
from paceline.core.schema import to_dict
from paceline.data.batches import Cursor
from paceline.data.corpus import Batch
from paceline.evaluate.validation import block_share, padding_batch, validate, validation_batches
from paceline.metrics.deferred import DeferredMetrics, Values
from paceline.metrics.meter import MeterState
from paceline.metrics.metrics_file import EvalMetrics, StepMetrics, finite
from paceline.metrics.sinks import JsonlSink, Sink
from paceline.settings.schedule import StepSettings
from paceline.train.loop import History, Hook, Loop, metrics_due


@dataclass(frozen=True, kw_only=True)
class SavedState:
    """What a checkpoint keeps besides tensors and config."""

    cursor: Cursor  # the data that comes next
    metrics_bytes: int  # length of the metrics file by then
    clocks: MeterState
    history: History = field(default_factory=History)
    evaluations: tuple[EvalMetrics, ...] = ()  # the validations so far, in case their lines of metrics are lost


class MetricsHook(Hook):
    def __init__(self, loop: Loop, deferred: DeferredMetrics) -> None:
        self._loop, self._deferred = loop, deferred

    def after_step(self, settings: StepSettings, values: Values) -> None:
        config, done = self._loop.run.config, settings.step + 1
        if metrics_due(config.metrics.every, done, config.steps):
            now, rate = _now(self._loop, settings, done), self._loop.meter.tokens_per_s
            line = StepMetrics(**now, train_loss=None, lr_scale=settings.lr_scale, tokens_per_s=rate)
            self._deferred.step(line, values)


def _now(loop: Loop, settings: StepSettings, done: int) -> dict[str, Any]:
    """What every line of metrics says, after so many steps. The widest window counts; None if the preset has none."""
    tokens, widest = loop.tokens_after(done), max(settings.windows.values(), default=None)
    meter = loop.meter
    return {"step": done, "tokens": tokens, "window_tokens": widest, "train_s": meter.train_s, "wall_s": meter.wall_s}


Shipped = Callable[[], AbstractContextManager[None]]


class EvaluationHook(Hook):
    """`shipped` swaps in the weights that a finished run ships, where those are others than it trains with."""

    def __init__(
        self, loop: Loop, deferred: DeferredMetrics, sink: Sink, on_evaluation: Callable[[], object], shipped: Shipped
    ) -> None:
        self._loop, self._deferred, self._sink, self._shipped = loop, deferred, sink, shipped
        self._on_evaluation = on_evaluation

    def before_step(self, settings: StepSettings) -> bool:
        if not self._due(settings.step):
            return False
        if (found := self._evaluated(settings)) is not None:
            self._loop.evaluations.append(found)
            self._sink.write(found)
            self._on_evaluation()
        return True

    def _due(self, step: int) -> bool:
        made, config = self._loop.evaluations, self._loop.run.config
        if made and made[-1].step == step:  # before this run was interrupted
            return False
        every = config.evaluate.every
        return step == config.steps or (every is not None and step % every == 0)

    def _evaluated(self, settings: StepSettings) -> EvalMetrics | None:
        """None: it was given up, because the run is to end."""
        loop, run, gradient = self._loop, self._loop.run, self._loop.gradient
        weights = self._shipped if settings.step == run.config.steps else contextlib.nullcontext
        token_bytes = None if run.tokenizer is None else run.tokenizer.token_byte_lengths()
        what = (run.forward, self._batches(), gradient.windows, token_bytes, run.ranks)
        with loop.meter.paused():
            self._deferred.flush()
            with weights(), gradient.droppable():
                found = validate(*what, device=run.machine.device, give_up=loop.stopping)
                extra = self._mask_facts()
        if found is None:
            return None
        now = _now(loop, settings, settings.step)
        return EvalMetrics(**now, val_loss=found.loss, val_bpb=found.bits_per_byte, extra=extra)

    def _batches(self) -> Iterator[Batch]:
        """This rank's; where a forward pass needs all ranks, padding takes the place of an empty one."""
        run = self._loop.run
        c, place = run.config, run.place
        length, micro = c.batch.sequence_tokens, run.largest_share.micro_sequences
        found = validation_batches(run.data.val, length, c.evaluate.tokens, micro, rank=place.run, world=place.runs)
        for batch in found:
            padded = not batch.targets.size and run.sync.forward_is_collective
            yield padding_batch(length) if padded else place.cut(batch)

    def _mask_facts(self) -> dict[str, float]:
        """What the mask of the first validation batch looks like at this window."""
        c = self._loop.run.config
        length, micro = c.batch.sequence_tokens, c.batch.micro_sequences
        first = next(validation_batches(self._loop.run.data.val, length, c.evaluate.tokens, micro))
        windows = self._loop.gradient.windows
        tokens = torch.from_numpy(first.tokens).to(windows.device)
        share = block_share(c.model, tokens, windows[0], end_of_text=c.data.end_of_text)
        return {} if share is None else {"full_block_share": float(share)}


class CheckpointHook(Hook):
    """`log` is None on ranks that write nothing; `asked` is the config as checkpoints keep it."""

    def __init__(
        self, loop: Loop, folder: RunFolder, deferred: DeferredMetrics, log: JsonlSink | None, asked: Mapping[str, Any]
    ) -> None:
        self._loop, self._folder, self._deferred, self._log, self._asked = loop, folder, deferred, log, asked
        self.saver = Saver(folder, keep=loop.run.config.checkpoint.keep, writes=log is not None)
        self.saved_step = loop.position.step or None

    def settle_in(self) -> None:
        """Before the first step: no checkpoint that a later launch would take for this run's newest; and one to come
        back to where several ranks compile, which cannot be interrupted, or the first weights came from elsewhere."""
        position, run = self._loop.position, self._loop.run
        if position.rewound:
            self.save(position.step)
            self.saver.wait()  # on the disk, before those after it go away
        if run.ranks.is_main:
            set_aside_after(self._folder, position.step)
        compiling = run.config.train.compile and run.ranks.world > 1
        if position.step == 0 and (compiling or position.history.init_from is not None):
            self.save(position.step)

    def after_step(self, settings: StepSettings, values: Values) -> None:
        config, done = self._loop.run.config, settings.step + 1
        every = config.checkpoint.every
        if every is not None and done % every == 0 and done != config.steps:
            self.save(done)

    def wants_stop(self) -> bool:
        self.saver.check()
        return False

    def save(self, step: int) -> None:
        """Begin to leave a checkpoint, with all ranks' help; rank 0's thread writes it."""
        run, meter = self._loop.run, self._loop.meter
        with meter.paused():
            self._deferred.flush()
            groups: dict[str, Mapping[str, Tensor]] = {
                "model": dict(run.model.named_parameters()),
                "optimizer": run.optimizer.state_dict(wanted=self._log is not None, copied=False),
                "random": of_all_ranks(run.ranks.to_first(random_states())),
                "buffers": run.model.state_buffers(),
                **{hook.name: hook.state() for hook in self._loop.hooks if hook.name},
            }
            written = 0 if self._log is None else self._log.position()
            state = SavedState(
                cursor=self._loop.cursor,
                metrics_bytes=written,
                clocks=meter.state(),
                history=self._loop.position.history,
                evaluations=tuple(self._loop.evaluations),
            )
            self.saver.save(Checkpoint(step, groups, state=finite(to_dict(state)), config=self._asked))
        self.saved_step = step
