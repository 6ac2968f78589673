"""A function of the calling program that looks at model and optimizer between steps (`paceline.pretrain(on_step=...)`).

It may look only: a weight that it has changed in place ends the run. Train time stands still meanwhile.
"""

from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from paceline.core.errors import ConfigError
from paceline.settings.schedule import StepSettings
from paceline.train.loop import Hook, Loop

if TYPE_CHECKING:
    from paceline.optim.optimizer import Optimizer


@dataclass(frozen=True)
class StepView:
    """A run after `step` updates: 0 is its start, `steps` its end."""

    step: int
    settings: StepSettings
    """Batch, windows, rates and so on of the step that comes next."""
    model: nn.Module
    """The model that trains, not a copy."""
    _optimizer: "Optimizer"

    def optimizer_state(self) -> dict[str, Tensor]:
        """A copy of every slot by its name in a checkpoint."""
        return self._optimizer.state_dict()


OnStep = Callable[[StepView], bool | None]


class OnStepHook(Hook):
    def __init__(self, loop: Loop, on_step: OnStep, at: Container[int] | None) -> None:
        self._loop, self._on_step, self._at = loop, on_step, at

    def before_step(self, settings: StepSettings) -> bool:
        if self._at is not None and settings.step not in self._at:
            return False
        model = self._loop.run.model
        held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        versions = {name: tensor._version for name, tensor in held.items()}
        with self._loop.meter.paused(), torch.no_grad():
            if self._on_step(StepView(settings.step, settings, model, self._loop.run.optimizer)) is True:
                self._loop.stop.ask()
        if changed := next((name for name, tensor in held.items() if tensor._version != versions[name]), None):
            cure = "it may only look, change a clone()"
            raise ConfigError(f"on_step has changed {changed} at step {settings.step}; {cure}")
        return True
