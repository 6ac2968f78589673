"""One training step: gradient, verdict, update.

The gradient is the true mean over the global batch. On a GPU that of a micro-batch may be replayed as a CUDA graph.
"""

import contextlib
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from paceline.core.signals import StopRequest
from paceline.data.feed import DeviceBatch
from paceline.metrics.deferred import Values
from paceline.model.loss import IGNORE_TARGET, Losses
from paceline.model.masks import window_tensor
from paceline.parallel.gradients import Replica, exchange, replicate, zero_in_place_
from paceline.parallel.ranks import SINGLE_PROCESS, Ranks
from paceline.settings.data import BatchConfig
from paceline.settings.schedule import StepSettings, tokens_before
from paceline.train.assemble import Assembly
from paceline.train.bad_steps import BadSteps

GUARDED_STEPS = 5  # steps of a shape in which compiled code still checks its inputs, as record 16 did it


class GradientStep:
    """What every step needs, set up once per launch. `stop` may end a gradient that a single process computes."""

    def __init__(self, run: Assembly, stop: StopRequest) -> None:
        self.run, self.stop = run, stop
        parameters = dict(run.model.named_parameters())
        self.bad_steps = BadSteps(run.config.bad_steps, parameters, run.sync, run.ranks, run.row_gradients)
        self.replica = replicate(run.forward, run.ranks, run.config.parallel, run.sync)  # ends with this object
        model, device = run.config.model, run.machine.device
        window_device = torch.device("cpu") if run.machine.backends.windows_on_host else device
        self.windows = window_tensor([0] * len(model.windows), window_device)
        self.loss_weights = torch.zeros(len(model.loss_terms), device=device)
        self.steps_of: Counter[tuple[int, int]] = Counter()  # by shape: what the compiler makes code for
        self.graphs = None
        if device.type == "cuda":
            from paceline.train.cuda_graph import CapturedGradients

            self.graphs = CapturedGradients.where_possible(run, self.replica, self.windows, self.loss_weights)

    def prepare(self, settings: StepSettings) -> None:
        """Put the step's windows, loss weights, dropout key and number of candidates where the model reads them."""
        for place, window in zip(self.windows.unbind(), settings.windows.values(), strict=False):
            place.fill_(window)
        for place, weight in zip(self.loss_weights.unbind(), settings.loss_weights, strict=True):
            place.fill_(weight)
        if self.run.model.dropout is not None:
            from paceline.model.dropout import step_key

            self.run.model.dropout.step_key.fill_(step_key(self.run.config.seed, settings.step))
        if self.run.model.sampler is not None:
            self.run.model.sampler.count = settings.candidates

    def take(self, settings: StepSettings, batch: DeviceBatch, *, measure: bool = False) -> Values:
        """Gradient and update, and what the step was like; `measure` asks for the diagnostics, too."""
        if measure:
            from paceline.train.diagnostics import measured_step

            values = measured_step(self, settings, batch)
        else:
            losses, skip = self.gradient(settings, batch)
            values = self.named(losses)
            if self.run.config.metrics.tracked:
                values["gradient_norm"] = self.run.optimizer.gradient_norm()
            self.run.optimizer.step(settings.groups, skip=skip)
        self.forget_gradients(self.run.share(settings.sequences))
        return values

    def named(self, losses: Tensor) -> Values:
        """The mean losses under the names that metrics have for them."""
        names = ("train_loss", *(f"loss_{term.name}" for term in self.run.config.model.loss_terms))
        return dict(zip(names, losses.unbind(), strict=True))

    def gradient(self, settings: StepSettings, batch: DeviceBatch) -> tuple[Tensor, Tensor | None]:
        """The mean losses of the global batch, (1 + terms,), and whether to skip the step, if bad steps are."""
        config, ranks = self.run.config, self.run.ranks
        share, compute = self.run.share(settings.sequences), forward_backward
        if self.graphs is not None:  # not to be dropped: a capture must be ended, and takes no longer than a step
            compute = self.graphs.of(batch, share.micro_sequences, settings.candidates) or forward_backward
        first = self.run.place.run * share.sequences
        if self.run.model.dropout is not None:
            compute = each_in_its_place(compute, self.run.model.dropout.first_sequence, first)
        if self.run.model.sampler is not None:
            before = tokens_before(config, settings.step) // config.batch.sequence_tokens
            compute = each_in_its_place(compute, self.run.model.sampler.first_sequence, before + first)
        shape = (share.micro_sequences, settings.candidates)
        with self._unguarded(shape), self.droppable():
            here = (self.replica, batch, self.windows, self.loss_weights)
            micro, padded = share.micro_sequences, config.data.align_documents
            losses = accumulate_gradient(
                *here, micro_sequences=micro, padded=padded, ranks=ranks, forward_backward=compute
            )
        self.steps_of[shape] += 1
        if config.bad_steps.skip:
            return self.bad_steps.judge(settings.step, losses)
        return ranks.sum_(losses), None

    def droppable(self) -> AbstractContextManager[None]:
        """Around what changes nothing: a signal ends it at once, unless other ranks would wait for this one."""
        return self.stop.droppable(self.run.ranks.world == 1)

    def _unguarded(self, shape: tuple[int, int]) -> AbstractContextManager[object]:
        """Under `train.skip_guards`, compiled code is trusted to fit its inputs once it has run a few steps of them."""
        trusted = self.run.config.train.skip_guards and self.steps_of[shape] >= GUARDED_STEPS
        return torch.compiler.set_stance(skip_guard_eval_unsafe=True) if trusted else contextlib.nullcontext()

    def forget_gradients(self, share: BatchConfig) -> None:
        """After an update, or after a pass that was no step."""
        views = isinstance(self.replica, Replica) and self.run.config.parallel.bucket_views
        if (self.graphs is not None and self.graphs.captured) or (views and share.sequences > share.micro_sequences):
            zero_in_place_(self.run.model.parameters())
            self.run.optimizer.clear_rows()
        else:  # None: the first micro-batch writes its gradient and need not add it
            self.run.optimizer.zero_grad()


def forward_backward(
    model: nn.Module, tokens: Tensor, targets: Tensor, windows: Tensor, weights: Tensor, counted: Tensor | int
) -> Tensor:
    """The main loss and each term, summed over tokens and over `counted`, (1 + terms,). The gradient of their weighted
    sum is now added to every `.grad`."""
    losses: Losses = model(tokens, targets, windows)
    main = losses.main.sum() / counted
    if not losses.terms:
        main.backward()  # type: ignore[no-untyped-call]
        return main.detach()[None]
    terms = torch.stack(losses.terms) / counted
    (main + (weights * terms).sum()).backward()
    return torch.cat([main[None], terms]).detach()


def each_in_its_place(compute: Callable[..., Tensor], first: Tensor, sequence: int) -> Callable[..., Tensor]:
    """`compute` for one micro-batch after another, with the number of its first sequence, from `sequence` on, written
    to `first`; dropout and the sampled softmax depend on it."""

    def run(model: nn.Module, tokens: Tensor, *rest: Any) -> Tensor:
        nonlocal sequence
        first.fill_(sequence)
        sequence += len(tokens)
        return compute(model, tokens, *rest)

    return run


def accumulate_gradient(
    model: nn.Module,
    batch: DeviceBatch,
    windows: Tensor,
    weights: Tensor,
    *,
    micro_sequences: int,
    padded: bool = False,
    ranks: Ranks = SINGLE_PROCESS,
    forward_backward: Callable[..., Tensor] = forward_backward,
) -> Tensor:
    """Add d(mean loss)/d(weights) into every `.grad`; `batch` is this rank's share of the global batch.

    Each micro-batch's losses are summed and divided by the counted targets of the global batch, however it is cut.
    Ranks exchange gradients once, in the last backward pass. `padded`: some targets do not count. Returns this rank's
    share of the mean losses, (1 + terms,) fp32, on the device; the shares of all ranks add up to them."""
    counted = ranks.sum_((batch.targets != IGNORE_TARGET).sum()) if padded else ranks.world * batch.targets.numel()
    total = torch.zeros(1 + len(weights), device=batch.tokens.device)
    micro = list(zip(batch.tokens.split(micro_sequences), batch.targets.split(micro_sequences), strict=True))
    for number, (tokens, targets) in enumerate(micro, start=1):
        with exchange(model, now=number == len(micro)):
            total += forward_backward(model, tokens, targets, windows, weights, counted)
    return total
