"""Rates and momentum as pure functions of the step, so that resume, plots and tests need no state.

Steps count from 0. Every record holds its rates at 1 and then follows one straight line that would reach the floor at
step `steps`, one past the last update: the smallest multiplier used is 1/cooldown, never 0. There is no warm-up of the
rate. A cool-down given as a share stays fractional (0.4 of 266 steps is 106.4), because the line is a function of
step/steps and rounding it would change every multiplier.
"""

from dataclasses import replace

from paceline.core.errors import ConfigError
from paceline.optim.config import MuonConfig, OptimConfig, ScheduleConfig


def lr_scale(step: int, *, steps: int, cooldown_steps: float, floor: float = 0.0) -> float:
    """Multiplier on every base rate at `step`: 1, then over the last `cooldown_steps` a line that ends at `floor`."""
    remaining = (steps - step) / cooldown_steps  # 1 where the line starts, 0 one step after the last
    return floor + (1.0 - floor) * remaining if remaining < 1.0 else 1.0


def cooldown_steps_of(schedule: ScheduleConfig, steps: int) -> float:
    """Length of the cool-down in a run of `steps`; a share of them need not be whole."""
    if schedule.cooldown_share is not None:
        return schedule.cooldown_share * steps
    assert schedule.cooldown_steps is not None  # ScheduleConfig holds exactly one of the two
    if schedule.cooldown_steps > steps:
        raise ConfigError(
            f"--optim.schedule.cooldown-steps {schedule.cooldown_steps} is longer than the run of {steps} steps, so "
            f"the full rate would never be used; use at most {steps}"
        )
    return schedule.cooldown_steps


def muon_momentum(step: int, muon: MuonConfig) -> float:
    """Momentum at `step`: a line from `momentum_start` over `momentum_warmup_steps`, then `momentum`."""
    if step >= muon.momentum_warmup_steps:
        return muon.momentum
    return muon.momentum_start + (muon.momentum - muon.momentum_start) * step / muon.momentum_warmup_steps


def scaled_to(optim: OptimConfig, steps_before: int, steps_after: int) -> OptimConfig:
    """The same recipe for a run of another length: a cool-down in steps keeps its proportion, a share is one already.

    The momentum warm-up stays as it is: a matter of the first gradients, not of the length of the run."""
    cooldown = optim.schedule.cooldown_steps
    if cooldown is None:
        return optim
    scaled = max(1, round(cooldown * steps_after / steps_before))
    return replace(optim, schedule=replace(optim.schedule, cooldown_steps=scaled))
