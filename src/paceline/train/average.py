"""Averaged weights as a hook (`optim.average`): an exponential moving average of the last steps, kept beside the
weights that train.

From the start step on, average ← average + (weights - average)/τ after every step, in fp32. What a finished run ships
is weights + blend · (average - weights), each tensor scaled back to the norm it had, because averaging shrinks it. The
weights of a checkpoint stay those that train. Costs one fp32 copy of the averaged groups and a pass over it a step.
"""

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from paceline.evaluate.load import shipped_weights
from paceline.metrics.deferred import Values
from paceline.settings.optim import AverageConfig
from paceline.settings.schedule import StepSettings
from paceline.train.assemble import Assembly
from paceline.train.loop import Hook


class AverageHook(Hook):
    name = "average"

    def __init__(self, run: Assembly) -> None:
        self._config, self._steps = run.config.optim.average, run.config.steps
        groups = run.model.parameter_groups()
        self._params: dict[str, nn.Parameter] = {
            name: param for group in self._config.groups for name, param in groups.get(group, {}).items()
        }
        self._average = {name: torch.zeros_like(param, dtype=torch.float32) for name, param in self._params.items()}

    def after_step(self, settings: StepSettings, values: Values) -> None:
        done, start = settings.step + 1, first_averaged(self._config, self._steps)
        if done < start:
            return
        rate = 1.0 if done == start else min(1.0, 1.0 / tau_steps(self._config, self._steps))
        with torch.no_grad():
            weights = [param.detach().float() for param in self._params.values()]
            torch._foreach_lerp_(list(self._average.values()), weights, rate)

    @contextlib.contextmanager
    def shipped(self) -> Iterator[None]:
        """While the block runs, the model has the weights that a finished run ships."""
        kept = {name: param.detach().clone() for name, param in self._params.items()}
        self._put(shipped_weights(kept, self._average, self._config))
        try:
            yield
        finally:
            self._put(kept)

    @torch.no_grad()
    def _put(self, weights: Mapping[str, Tensor]) -> None:
        for name, weight in weights.items():
            self._params[name].copy_(weight)

    def state(self) -> dict[str, Tensor]:
        return dict(self._average)

    def load(self, state: Mapping[str, Tensor]) -> None:
        for name, tensor in state.items():
            self._average[name].copy_(tensor)


def tau_steps(config: AverageConfig, steps: int) -> float:
    return config.tau_steps if config.tau_steps is not None else (config.tau_share or 0.0) * steps


def first_averaged(config: AverageConfig, steps: int) -> int:
    """After how many steps the average begins."""
    return max(1, round(config.start_share * steps))
