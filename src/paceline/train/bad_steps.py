"""Bad steps: a loss or a gradient that is not finite, or a loss far above those before. Such a step is skipped.

Found on the device: a norm per gradient, and of these one vector of flags that ranks add up together with the loss, so
that all of them skip the same step. The optimizer reads the verdict where it lies; the host learns it when a copy has
arrived, and never waits. After `bad_steps.limit` skipped steps in a row the run stops, and `bad_step_report` looks for
the tensor and the data.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from paceline.core.errors import RunError
from paceline.core.output import tell
from paceline.kernels.row_gradients import RowGradients
from paceline.metrics.deferred import copy_to_host
from paceline.optim.rule import norms_of
from paceline.parallel.embedding_sync import DeferredAllReduce, part_here
from paceline.parallel.ranks import Ranks
from paceline.settings.run import BadStepsConfig
from paceline.train.loop import Hook

MEMORY_STEPS = 100  # over which the loss's mean and variance are taken, by weights that fall exponentially
LEARNING_STEPS = 50  # good steps before a loss can be judged by those before it
SKIPPED, IN_ROW, LAST_STEP, CULPRIT, LOSS, MEAN, VARIANCE, SEEN = range(8)
"""Places of the state, one fp64 vector: steps skipped in all and in a row; of the last one its number, what was wrong
and its loss; mean and variance of good losses, and how many there were."""


class BadSteps(Hook):
    """`parameters` by name, of which those of `late` are added up by themselves, and those in `rows` have row
    gradients."""

    name = "bad_steps"

    def __init__(
        self,
        config: BadStepsConfig,
        parameters: Mapping[str, nn.Parameter],
        late: DeferredAllReduce,
        ranks: Ranks,
        rows: Mapping[str, RowGradients] | None = None,
    ) -> None:
        self.config, self.ranks, self._rows = config, ranks, dict(rows or {})
        apart = {id(param) for param in late.params} if ranks.world > 1 else set()
        self._late = {name: param for name, param in parameters.items() if id(param) in apart}
        self._others = {name: param for name, param in parameters.items() if id(param) not in apart}
        self._late_flags: Tensor | None = None
        self.names: list[str] = []
        """Of the gradients behind the flags, in their order. A parameter that never has one has no place there."""
        if config.skip:
            late.before_sums = self._flag_late  # afterwards they are on their way, and may not be read
        device = next(iter(parameters.values())).device
        self._state = torch.zeros(8, dtype=torch.float64, device=device)
        self._copy: tuple[Tensor, Callable[[], bool]] | None = None
        self.known, self._reported = [0.0] * 8, 0

    @torch.no_grad()
    def judge(self, step: int, losses: Tensor) -> tuple[Tensor, Tensor]:
        """The mean losses of the global batch from this rank's share of them, (1 + terms,), and whether to skip the
        step, 0-D bool: both still on the device."""
        flags = [_flags(self._others), *([] if self._late_flags is None else [self._late_flags])]
        self.names = [*_with_gradient(self._others), *_with_gradient(self._late), *self._rows]
        if self._rows:
            flags.append(_not_finite([rows.rows for rows in self._rows.values()]))
        found = self.ranks.sum_(torch.cat([losses, *flags]))
        losses, bad = found[: len(losses)], found[len(losses) :] > 0
        loss = losses[0]
        reasons = torch.cat([~losses.isfinite().all()[None], self._is_spike(loss)[None], bad])
        skip = reasons.any()
        self._state = self._updated(step, loss, skip, reasons.byte().argmax())
        self._receive()
        if self._copy is None:  # else one is still on its way to the host
            self._copy = copy_to_host(self._state)
        return losses, skip

    @property
    def exhausted(self) -> bool:
        return self.known[IN_ROW] >= self.config.limit  # as far as the host knows

    def wants_stop(self) -> bool:
        if (line := self.news()) is not None and self.ranks.is_main:
            tell(line)
        return self.exhausted

    def news(self) -> str | None:
        """A line about steps skipped since the last call, once the host knows of them."""
        self._receive()
        if self.skipped == self._reported:
            return None
        from paceline.train.bad_step_report import reason

        self._reported = self.skipped
        return f"step {self.last_step + 1} skipped: {reason(self)} ({self.skipped} skipped in all)"

    def wait(self) -> None:
        """Let the host know all that the device knows."""
        self.known = self._state.tolist()

    @property
    def skipped(self) -> int:
        return int(self.known[SKIPPED])

    @property
    def last_step(self) -> int:
        return int(self.known[LAST_STEP])  # counted from 0

    def state(self) -> dict[str, Tensor]:
        return {"state": self._state.cpu()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Resuming resets the counter of consecutive skips."""
        if "state" not in state:
            return
        if not all(0 <= count < 2**53 for count in state["state"][SKIPPED:LOSS].tolist()):
            raise RunError(f"{self.name}: its counts are no numbers of steps; resume from another checkpoint")
        self._state.copy_(state["state"])
        if self._state[IN_ROW] >= self.config.limit:
            self._state[IN_ROW] = 0
        self.wait()
        self._reported = self.skipped

    def _is_spike(self, loss: Tensor) -> Tensor:
        if self.config.spike is None:
            return torch.zeros_like(loss, dtype=torch.bool)
        mean, variance, seen = self._state[MEAN:].unbind()
        return (loss - mean > self.config.spike * variance.sqrt()) & (seen >= LEARNING_STEPS)

    def _updated(self, step: int, loss: Tensor, skip: Tensor, culprit: Tensor) -> Tensor:
        old = self._state
        here = torch.full_like(old[0], step)
        bad = torch.stack([old[SKIPPED] + 1, old[IN_ROW] + 1, here, culprit, loss, *old[MEAN:].unbind()])
        good = torch.stack([old[SKIPPED], torch.zeros_like(here), *old[LAST_STEP:MEAN].unbind(), *self._learnt(loss)])
        return torch.where(skip, bad, good)

    def _learnt(self, loss: Tensor) -> list[Tensor]:
        """Mean, variance and count with one more loss; plain averages until there are `MEMORY_STEPS`."""
        mean, variance, seen = self._state[MEAN:].unbind()
        if self.config.spike is None:
            return [mean, variance, seen]
        weight = 1.0 / (seen + 1).clamp(max=MEMORY_STEPS)
        off = loss - mean
        return [mean + weight * off, (1 - weight) * (variance + weight * off.square()), seen + 1]

    def _flag_late(self) -> None:
        self._late_flags = _flags(self._late) if self._late else None

    def _receive(self) -> None:
        if self._copy is not None and self._copy[1]():
            self.known, self._copy = self._copy[0].tolist(), None


def _with_gradient(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Gradients by name; of a DTensor, the part that is here: each rank looks at its own."""
    return {name: part_here(param.grad) for name, param in parameters.items() if param.grad is not None}


def _flags(parameters: Mapping[str, nn.Parameter]) -> Tensor:
    return _not_finite([*_with_gradient(parameters).values()])


def _not_finite(grads: list[Tensor]) -> Tensor:
    """For each 1.0 if anything in it is not finite, or so large that its norm is not; (n,) fp32."""
    return (~norms_of(grads).isfinite()).float()
