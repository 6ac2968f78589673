"""Which rule moves which class of parameter, and how fast. No torch.

Parameter classes: `matrices` (2-D weights inside blocks), `embeddings` (token and value tables), `head`, `scalars`.
A tied head counts as an embedding.
"""

import math
from dataclasses import dataclass, field
from typing import Literal

from paceline.core.errors import ConfigError


def check_rates(flag: str, config: object, names: tuple[str, ...]) -> None:
    """Rates and decays are finite and not negative."""
    for name in names:
        if not 0 <= (value := getattr(config, name)) < math.inf:
            raise ConfigError(f"{flag}.{name.replace('_', '-')} {value} must be a number of at least 0")


@dataclass(frozen=True, kw_only=True)
class MuonConfig:
    """Momentum, then the nearest orthogonal matrix by Newton–Schulz, then a step scaled by shape."""

    lr: float = 0.05
    """Base rate of the matrices."""
    momentum: float = 0.95
    """Momentum after the warm-up."""
    momentum_start: float = 0.95
    """Momentum at step 0."""
    momentum_warmup_steps: int = 0
    """Steps of the straight line between the two; not scaled with the length of the run. 0: none."""
    momentum_form: Literal["sum", "average"] = "average"
    """`sum`: b ← μb + G, U = G + μb. `average`: b ← μb + (1-μ)G, U = (1-μ)G + μb. Equal up to scale at a fixed μ."""
    scale_rule: Literal["longest_side", "aspect"] = "aspect"
    """Step factor by shape: sqrt(max(rows, cols)), or sqrt(max(1, rows/cols))."""
    ns_steps: int = 5
    """Newton–Schulz iterations."""
    ns_association: Literal["polynomial_first", "product_first"] = "polynomial_first"
    """aX + (bA + cA²)X, or aX + b(AX) + cA(AX): the same number, rounded differently."""
    ns_norm_of: Literal["rounded", "unrounded"] = "rounded"
    """Whether the norm that scales the input is taken after or before rounding to the working format."""
    ns_dtype: Literal["bf16", "fp32"] = "bf16"
    """Working format of the iteration; fp32 where the device has no bf16 products."""
    weight_decay: float = 0.0
    """Decoupled decay: M ← M (1 - lr * weight_decay) before the update."""

    def __post_init__(self) -> None:
        for name in ("momentum", "momentum_start"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ConfigError(f"--optim.muon.{name.replace('_', '-')} {getattr(self, name)} is outside [0, 1)")
        check_rates("--optim.muon", self, ("lr", "weight_decay", "momentum_warmup_steps"))
        if self.ns_steps < 1:
            raise ConfigError(f"--optim.muon.ns-steps {self.ns_steps} must be at least 1; the records use 5")


@dataclass(frozen=True, kw_only=True)
class AdamConfig:
    """Adam for everything Muon does not take. Bias correction on; arithmetic fp32; moments in the parameter's dtype."""

    embedding_lr: float = 0.6
    """Rate of the token and value tables (and of a tied head)."""
    head_lr: float = 0.008
    """Rate of an untied head."""
    scalar_lr: float = 0.04
    """Rate of the learned scalars."""
    matrix_lr: float = 0.003
    """Rate of the matrices when `optim.matrices` is adamw."""
    beta1: float = 0.8
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    """Decoupled decay of every Adam class."""
    grouping: Literal["one", "per_class"] = "one"
    """One optimizer object with a group per class, or an object per class: the same numbers."""

    def __post_init__(self) -> None:
        for name in ("beta1", "beta2"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ConfigError(f"--optim.adam.{name} {getattr(self, name)} is outside [0, 1)")
        check_rates("--optim.adam", self, ("embedding_lr", "head_lr", "scalar_lr", "matrix_lr", "weight_decay"))
        if not self.eps > 0:
            raise ConfigError(f"--optim.adam.eps {self.eps} must be positive")


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Multiplier on every base rate: 1, then a straight line down over the cool-down to `floor`."""

    cooldown_steps: int | None = None
    """Length of the cool-down in steps; scaled in proportion by `--steps`."""
    cooldown_share: float | None = 0.4
    """Or as a share of the run."""
    floor: float = 0.0
    """Multiplier that the line would reach at the step after the last."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.floor <= 1.0:
            raise ConfigError(f"--optim.schedule.floor {self.floor} is outside [0, 1]; the records use 0")
        if (self.cooldown_steps is None) == (self.cooldown_share is None):
            raise ConfigError(
                f"--optim.schedule.cooldown-steps {self.cooldown_steps} and --optim.schedule.cooldown-share "
                f"{self.cooldown_share}: set exactly one of them, the other to None"
            )
        if self.cooldown_share is not None and not 0.0 < self.cooldown_share <= 1.0:
            raise ConfigError(f"--optim.schedule.cooldown-share {self.cooldown_share} is outside (0, 1]")
        if self.cooldown_steps is not None and self.cooldown_steps < 1:
            raise ConfigError(f"--optim.schedule.cooldown-steps {self.cooldown_steps} must be at least 1")


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    matrices: Literal["muon", "adamw"] = "muon"
    """Rule for the 2-D weights inside blocks."""
    muon: MuonConfig = field(default_factory=MuonConfig)
    adam: AdamConfig = field(default_factory=AdamConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    clip_norm: float | None = None
    """Scale the gradient down to this global norm where it exceeds it; None: off."""

    def __post_init__(self) -> None:
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ConfigError(f"--optim.clip-norm {self.clip_norm} must be positive; use None for no clipping")
