"""Which rule moves which group of parameters, and how fast. No torch.

Groups: `matrices` (2-D weights inside blocks), `embeddings`, `value_embeddings`, `lm_head`, `scalars`, `vectors`
(weights of norms, biases), and what a model declares besides. A tied head is the embedding.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from paceline.core.command_line import Hidden
from paceline.core.errors import ConfigError
from paceline.settings.limits import (
    BELOW_1,
    NOT_NEGATIVE,
    POSITIVE,
    POSITIVE_FINITE,
    SHARE,
    UNIT_INTERVAL,
    Limited,
    at_least,
)

POLAR_EXPRESS_MAPS = 5


@dataclass(frozen=True, kw_only=True)
class MuonConfig(Limited, prefix="--optim.muon."):
    """Momentum, then the nearest orthogonal matrix by Newton–Schulz, then a step scaled by shape."""

    lr: Annotated[float, NOT_NEGATIVE] = 0.05
    """Base rate of the matrices."""
    momentum: Annotated[float, BELOW_1] = 0.95
    """Momentum after the warm-up."""
    momentum_start: Annotated[float, BELOW_1] = 0.95
    """Momentum at step 0."""
    momentum_warmup_steps: Annotated[int, NOT_NEGATIVE] = 0
    """Steps of the straight line between the two; not scaled with the length of the run. 0: none."""
    momentum_warmup_share: Annotated[float | None, SHARE] = None
    """Length of the momentum warm-up as a share of the run, instead of in steps."""
    momentum_cooldown_share: Annotated[float, UNIT_INTERVAL] = 0.0
    """Over this share of the run, the last, momentum goes back to `momentum_start`. 0: none."""
    momentum_form: Literal["sum", "average"] = "average"
    """`sum`: b ← μb + G, U = G + μb. `average`: b ← μb + (1-μ)G, U = (1-μ)G + μb. Equal up to scale at a fixed μ."""
    scale_rule: Literal["longest_side", "aspect"] = "aspect"
    """Step factor by shape: sqrt(max(rows, cols)), or sqrt(max(1, rows/cols))."""
    mlp_output_rate: Annotated[float, POSITIVE_FINITE] = 1.0
    """Factor on the rate of the MLPs' output matrices."""
    ns_steps: Annotated[int, at_least(1, 100).saying("the records use 5")] = 5
    """Newton–Schulz iterations."""
    ns_maps: Literal["quintic", "polar_express"] = "quintic"
    """The polynomial of each iteration: one for all, or the five of Polar Express, which lift small singular values
    twice as fast."""
    ns_association: Literal["polynomial_first", "product_first"] = "polynomial_first"
    """aX + (bA + cA²)X, or aX + b(AX) + cA(AX): the same number, rounded differently."""
    ns_norm_of: Literal["rounded", "unrounded"] = "rounded"
    """Whether the norm that scales the input is taken after or before rounding to the working format."""
    ns_dtype: Literal["bf16", "fp32"] = "bf16"
    """Working format of the iteration; fp32 where the device has no bf16 products."""
    row_beta2: Annotated[float | None, BELOW_1] = None
    """NorMuon: scale the rows of an update (of a wide matrix its columns) by their own second moments, averaged with
    this β₂, and keep the norm of the whole. None: off."""
    weight_decay: Annotated[float, NOT_NEGATIVE] = 0.0
    """Decoupled decay: M ← M (1 - lr * weight_decay) before the update."""
    cautious_decay: bool = False
    """Decay, by rate² and the shape's factor, only where the update makes a weight smaller as well."""

    def check(self) -> None:
        if self.momentum_warmup_steps and self.momentum_warmup_share is not None:
            steps = f"momentum-warmup-steps {self.momentum_warmup_steps}"
            raise ConfigError(f"--optim.muon.{steps} and --optim.muon.momentum-warmup-share: set one of them")
        if self.ns_maps == "polar_express" and self.ns_steps > POLAR_EXPRESS_MAPS:
            raise ConfigError(f"--optim.muon.ns-steps {self.ns_steps}: Polar Express has {POLAR_EXPRESS_MAPS} maps")


@dataclass(frozen=True, kw_only=True)
class AdamConfig(Limited, prefix="--optim.adam."):
    """Adam for everything Muon does not take. Bias correction on; arithmetic fp32; moments in the parameter's dtype."""

    embedding_lr: Annotated[float, NOT_NEGATIVE] = 0.6
    """Rate of the token and value tables (and of a tied head)."""
    lm_head_lr: Annotated[float, NOT_NEGATIVE] = 0.008
    """Rate of an untied head."""
    scalar_lr: Annotated[float, NOT_NEGATIVE] = 0.04
    """Rate of the learned scalars."""
    matrix_lr: Annotated[float, NOT_NEGATIVE] = 0.003
    """Rate of the matrices when `optim.matrices` is adamw."""
    vector_lr: Annotated[float, NOT_NEGATIVE] = 0.003
    """Rate of the weights of norms and of biases."""
    gate_lr: Annotated[float, NOT_NEGATIVE] = 0.008
    """Rate of the small matrices of gates."""
    mix_lr: Annotated[float, NOT_NEGATIVE] = 0.002
    """Rate of the small networks of mixes."""
    ngram_lr: Annotated[float, NOT_NEGATIVE] = 0.56
    """Rate of the n-gram tables, which adam_rows moves."""
    beta1: Annotated[float, BELOW_1] = 0.8
    beta2: Annotated[float, BELOW_1] = 0.95
    eps: Annotated[float, POSITIVE] = 1e-8
    weight_decay: Annotated[float, NOT_NEGATIVE] = 0.0
    """Decoupled decay of every Adam class."""
    decay_vectors: bool = True
    """Off: no decay of 1-D parameters, which are the scalars, the weights of norms and the biases."""


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig(Limited, prefix="--optim.schedule."):
    """Multiplier on every base rate: a line up over the warm-up, 1, then over the cool-down down to `floor`."""

    warmup_steps: Annotated[int, at_least(0)] = 0
    """Step s of the warm-up has (s + 1)/warmup-steps of the rate; scaled in proportion by `--steps`. 0: none."""
    shape: str = "linear"
    """Of the cool-down: linear (a straight line), cosine (half of one), or a rate shape of a plug-in."""
    cooldown_steps: Annotated[int | None, at_least(1)] = None
    """Length of the cool-down in steps; scaled in proportion by `--steps`."""
    cooldown_share: Annotated[float | None, SHARE] = 0.4
    """Or as a share of the run after the warm-up."""
    floor: Annotated[float, UNIT_INTERVAL.saying("the records use 0")] = 0.0
    """Multiplier that the cool-down would reach at the step after the last."""

    def check(self) -> None:
        if (self.cooldown_steps is None) == (self.cooldown_share is None):
            both = f"cooldown-steps {self.cooldown_steps} and --optim.schedule.cooldown-share {self.cooldown_share}"
            raise ConfigError(f"--optim.schedule.{both}: set exactly one of them, the other to None")


@dataclass(frozen=True, kw_only=True)
class GroupConfig(Limited, prefix="optim.groups: "):
    """Changes for one group of parameters; None takes what `optim.muon` and `optim.adam` say of it."""

    name: str
    """As the model's description names it: matrices, embeddings, value_embeddings, lm_head, scalars, vectors, or a
    new one."""
    rule: str | None = None
    """The rule that moves it: muon, adam, adam_rows, or one of a plug-in."""
    lr: Annotated[float | None, NOT_NEGATIVE] = None
    beta1: Annotated[float | None, BELOW_1] = None
    beta2: Annotated[float | None, BELOW_1] = None
    eps: Annotated[float | None, NOT_NEGATIVE] = None
    weight_decay: Annotated[float | None, NOT_NEGATIVE] = None
    every: Annotated[int, at_least(1)] = 1
    """Move only at every so many steps, by the sum of the gradients since."""

    def check(self) -> None:
        if self.rule is not None and not self.rule.isidentifier():
            raise ConfigError(f"optim.groups: {self.rule!r} is no rule's name")

    def of(self) -> str:
        return f" of {self.name!r}"


@dataclass(frozen=True, kw_only=True)
class AverageConfig(Limited, prefix="--optim.average."):
    """Weights averaged over the last steps (an exponential moving average), for the last validation and for export."""

    tau_steps: Annotated[float | None, POSITIVE_FINITE] = None
    """Steps over which weights are averaged: each moves the average by 1/tau towards the weights."""
    tau_share: Annotated[float | None, POSITIVE_FINITE] = None
    """The same as a share of the run. Exactly one of the two switches averaging on."""
    start_share: Annotated[float, UNIT_INTERVAL] = 0.7
    """The average begins with the weights after this share of the run."""
    blend: Annotated[float, UNIT_INTERVAL] = 1.0
    """What is shipped: weights + blend · (average - weights)."""
    rescale: bool = True
    """Scale each shipped tensor to the norm it had before averaging."""
    groups: tuple[str, ...] = ("matrices", "embeddings", "lm_head")
    """Which groups are averaged."""

    def check(self) -> None:
        if self.tau_steps is not None and self.tau_share is not None:
            raise ConfigError("--optim.average.tau-steps and --optim.average.tau-share: set one of them, or none")

    @property
    def on(self) -> bool:
        return self.tau_steps is not None or self.tau_share is not None


@dataclass(frozen=True, kw_only=True)
class OptimConfig(Limited, prefix="--optim."):
    matrices: str = "muon"
    """Rule for the 2-D weights inside blocks: muon, adamw, or another rule (a module of `optim/rules`, or of a
    plug-in), with the rate `optim.adam.matrix_lr`."""
    muon: MuonConfig = field(default_factory=MuonConfig)
    adam: AdamConfig = field(default_factory=AdamConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    groups: Hidden[tuple[GroupConfig, ...]] = ()
    """Groups that are moved otherwise than these say; set by a preset or a config file."""
    average: AverageConfig = field(default_factory=AverageConfig)
    clip_norm: Annotated[float | None, POSITIVE.saying("use None for no clipping")] = None
    """Scale the gradient down to this global norm where it exceeds it; None: off."""
