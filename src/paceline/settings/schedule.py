"""All settings of a step as one value, from one pure function: resume, plots, tests and the planner need no state.

Steps count from 0; step `steps` only validates, at the settings it would have. Without stages a run is one stage of
its own. A stage's border is the sum of the shares before it, times the steps, rounded. No torch.

Every record holds its rates at 1 and then follows one straight line that would reach the floor at step `steps`, one
past the last update: the smallest multiplier used is 1/cooldown, never 0. The baselines warm up before that, and cool
down by a cosine. A cool-down given as a share stays fractional (0.4 of 266 steps is 106.4), because the line is a
function of step/steps and rounding it would change every multiplier.
"""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Annotated

from paceline.core.errors import ConfigError
from paceline.core.units import BLOCK_TOKENS
from paceline.settings import plugins
from paceline.settings.data import BatchConfig
from paceline.settings.groups import GroupSettings, param_groups
from paceline.settings.limits import NOT_NEGATIVE, SHARE, Limited, at_least
from paceline.settings.model import WindowKind
from paceline.settings.optim import MuonConfig, OptimConfig, ScheduleConfig
from paceline.settings.spec import describe

if TYPE_CHECKING:
    from paceline.settings.run import RunConfig

SAMPLED_STEPS = 10_000
"""About so many steps of a longer run are looked at where a mean over the schedule is taken."""


@dataclass(frozen=True, kw_only=True)
class Stage(Limited, prefix="stages: "):
    """A share of the run's steps with settings of its own; None keeps the run's."""

    share: Annotated[float, SHARE]
    """Of all steps. The shares of all stages add up to 1."""
    batch_tokens: Annotated[int | None, at_least(1)] = None
    """Tokens of a step."""
    lr: Annotated[float, NOT_NEGATIVE] = 1.0
    """Factor on every rate, on top of the cool-down."""
    window_tokens: Annotated[int | None, at_least(1, 1 << 30)] = None
    """The attention window, instead of its growth."""
    long_window_tokens: Annotated[int | None, at_least(1, 1 << 30)] = None
    """The same of the second window."""
    candidates: Annotated[int | None, at_least(0).saying("0 computes all logits")] = None
    """Of the sampled softmax, for which `model.candidates` must be set; 0: all ids."""
    loss_weights: tuple[float, ...] | None = None
    """A factor on the weight of each loss term, in the order of `model.loss_terms`."""


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    step: int
    stage: int
    sequences: int
    """Of the global batch."""
    windows: dict[WindowKind, int]
    """In tokens, by kind; empty without windows."""
    lr_scale: float
    """Multiplier on every base rate: the cool-down times the stage's factor."""
    groups: dict[str, GroupSettings]
    candidates: int
    """Of the sampled softmax; 0: all ids."""
    loss_weights: tuple[float, ...]
    """Of the loss terms, in their order."""


def schedule(run: "RunConfig", step: int) -> StepSettings:
    """The settings of a step."""
    index = stage_of(run, step)
    stage = stages_of(run)[index]
    steps, rates = run.steps, run.optim.schedule
    scale = stage.lr * rate_at(rates, step, steps)
    momentum = muon_momentum(step, steps, run.optim.muon)
    groups = param_groups(run.optim, describe(run.model).groups)
    factors = stage.loss_weights or (1.0,) * len(run.model.loss_terms)
    return StepSettings(
        step=step,
        stage=index,
        sequences=batch_tokens(run, stage) // run.batch.sequence_tokens,
        windows=windows_at(run, step),
        lr_scale=scale,
        groups={name: group.settings(step, steps, scale, momentum) for name, group in groups.items()},
        candidates=candidates_at(run, step),
        loss_weights=tuple(term.weight * by for term, by in zip(run.model.loss_terms, factors, strict=True)),
    )


def candidates_at(run: "RunConfig", step: int) -> int:
    """Of the sampled softmax; 0: all ids."""
    stated = stages_of(run)[stage_of(run, step)].candidates
    return (run.model.candidates or 0) if stated is None else stated


def fewest_candidates(run: "RunConfig") -> int:
    """Of all stages; 0: all compute all logits."""
    return min(filter(None, (candidates_at(run, step) for step in stage_starts(run)[:-1])), default=0)


def windows_at(run: "RunConfig", step: int) -> dict[WindowKind, int]:
    stage = stages_of(run)[stage_of(run, step)]
    fixed: dict[WindowKind, int | None] = {"short": stage.window_tokens, "long": stage.long_window_tokens}
    return {
        kind: found if (found := fixed[kind]) is not None else window.tokens_at(step, run.steps)
        for kind, window in run.model.windows.items()
    }


def widest_windows(run: "RunConfig") -> dict[WindowKind, int]:
    """Of the whole schedule: at the first or last step of a stage, since a window grows or shrinks in one direction."""
    starts = stage_starts(run)
    ends = {*starts[:-1], *(start - 1 for start in starts[1:]), run.steps}
    return {kind: max(windows_at(run, step)[kind] for step in ends) for kind in run.model.windows}


def stages_of(run: "RunConfig") -> tuple[Stage, ...]:
    return run.stages or (Stage(share=1.0),)


def stage_starts(run: "RunConfig") -> list[int]:
    """The first step of each stage, and the number of steps."""
    return [0, *(round(run.steps * share) for share in accumulate(stage.share for stage in stages_of(run)))]


def stage_of(run: "RunConfig", step: int) -> int:
    """Step `steps` belongs to the last stage."""
    return min(bisect_right(stage_starts(run), step), len(stages_of(run))) - 1


def batch_tokens(run: "RunConfig", stage: Stage) -> int:
    return run.batch.tokens if stage.batch_tokens is None else stage.batch_tokens


def batches_of(run: "RunConfig") -> list[BatchConfig]:
    """The batch of each stage."""
    return [run.batch.with_tokens(batch_tokens(run, stage)) for stage in stages_of(run)]


def largest_batch(run: "RunConfig") -> BatchConfig:
    return max(batches_of(run), key=lambda batch: batch.tokens)


def tokens_before(run: "RunConfig", step: int) -> int:
    """Training tokens of all steps before this one."""
    starts = stage_starts(run)
    lengths = (min(step, end) - min(step, start) for start, end in pairwise(starts))
    return sum(n * batch_tokens(run, stage) for n, stage in zip(lengths, stages_of(run), strict=True))


def tokens_of(run: "RunConfig", step: int) -> int:
    return tokens_before(run, step + 1) - tokens_before(run, step)


def sequences_from(run: "RunConfig", step: int) -> Iterator[int]:
    """Sequences of the batch of this step and of each that follows, without end."""
    while True:
        yield batch_tokens(run, stages_of(run)[stage_of(run, step)]) // run.batch.sequence_tokens
        step += 1


def sampled_steps(steps: int) -> range:
    """Every step of a run, or of a very long one an even sample."""
    return range(0, steps, max(1, steps // SAMPLED_STEPS))


def tokens_by_windows(run: "RunConfig", steps: Iterable[int]) -> Counter[tuple[tuple[WindowKind, int], ...]]:
    """How many tokens of these steps are trained under which windows, each kind with its width."""
    found = Counter[tuple[tuple[WindowKind, int], ...]]()
    for step in steps:
        found[tuple(windows_at(run, step).items())] += tokens_of(run, step)
    return found


def mean_batch_tokens(run: "RunConfig") -> float:
    """Of a step, over all of them."""
    return tokens_before(run, run.steps) / run.steps


def check_stages(run: "RunConfig") -> None:
    """Raise ConfigError, naming the field, if the stages cannot be carried out."""
    total = sum(stage.share for stage in stages_of(run))
    if not math.isclose(total, 1.0, abs_tol=1e-6):
        raise ConfigError(f"stages: their shares add up to {total:g}, not 1; change a share")
    starts = stage_starts(run)
    for number, (stage, start, end) in enumerate(zip(stages_of(run), starts, starts[1:], strict=False), start=1):
        if end <= start:
            raise ConfigError(f"stages: stage {number} has no step in a run of {run.steps}; raise its share or --steps")
        run.batch.with_tokens(batch_tokens(run, stage))
        if stage.long_window_tokens is not None and run.model.long_window is None:
            raise ConfigError(f"stages: stage {number} sets long_window_tokens, but model.long_window is not set")
        if stage.candidates and run.model.candidates is None:
            raise ConfigError(
                f"stages: stage {number} has {stage.candidates:,} candidates; set --model.candidates, too"
            )
        if stage.candidates and stage.candidates > (rows := run.model.lm_head_rows):
            raise ConfigError(
                f"stages: stage {number} has {stage.candidates:,} candidates of {rows:,} rows of the head"
            )
        weights, terms = stage.loss_weights, run.model.loss_terms
        if weights is not None and len(weights) != len(terms):
            raise ConfigError(f"stages: stage {number} has {len(weights)} loss_weights for {len(terms)} loss_terms")
        unit = run.model.window.unit
        for window in filter(None, (stage.window_tokens, stage.long_window_tokens)):
            if unit == "none":
                raise ConfigError(f"stages: stage {number} sets a window, but --model.window.unit is none")
            if unit == "blocks" and window % BLOCK_TOKENS:
                raise ConfigError(f"stages: stage {number} has a window of {window}, not a multiple of {BLOCK_TOKENS}")


def rate_at(schedule: ScheduleConfig, step: int, steps: int) -> float:
    """Multiplier on every base rate at `step`."""
    length, floor = cooldown_steps_of(schedule, steps), schedule.floor
    if step < schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
    shape = RATE_SHAPES.get(schedule.shape) or plugins.find("rate_shapes", schedule.shape)
    if shape is None:
        raise ConfigError(
            f"--optim.schedule.shape {schedule.shape!r:.60} is not loaded; a plug-in's needs --plugin FILE"
        )
    found = lr_scale(step, steps=steps, cooldown_steps=length, floor=floor, shape=shape)
    if not 0.0 <= found < math.inf:
        where = f"gives {found} at step {step} of {steps}"
        raise ConfigError(f"--optim.schedule.shape {schedule.shape} {where}; a multiplier is finite and not negative")
    return found


RateShape = Callable[[float], float]
RATE_SHAPES: dict[str, RateShape] = {
    "linear": lambda remaining: remaining,
    "cosine": lambda remaining: 0.5 - 0.5 * math.cos(math.pi * remaining),
}
"""From what remains of the cool-down to the multiplier, both from 1 to 0. A plug-in may bring others."""


def lr_scale(
    step: int, *, steps: int, cooldown_steps: float, floor: float = 0.0, shape: RateShape = RATE_SHAPES["linear"]
) -> float:
    """Multiplier after the warm-up: 1, then over the last `cooldown_steps` down to `floor`."""
    remaining = (steps - step) / cooldown_steps  # 1 where the cool-down starts, 0 one step after the last
    if remaining >= 1.0:
        return 1.0
    return floor + (1.0 - floor) * shape(remaining)


def cooldown_steps_of(schedule: ScheduleConfig, steps: int) -> float:
    """Length of the cool-down in a run of `steps`; a share of them need not be whole."""
    warmup = schedule.warmup_steps
    if warmup >= max(1, steps):
        raise ConfigError(f"--optim.schedule.warmup-steps {warmup} leaves nothing of the run of {steps} steps")
    if schedule.cooldown_share is not None:
        return schedule.cooldown_share * (steps - warmup)
    cooldown = schedule.cooldown_steps
    assert cooldown is not None  # ScheduleConfig holds exactly one of the two
    if cooldown > steps - warmup:
        after = f" after {warmup} of --optim.schedule.warmup-steps" if warmup else ""
        raise ConfigError(f"--optim.schedule.cooldown-steps {cooldown} is longer than the run of {steps} steps{after}")
    return cooldown


def muon_momentum(step: int, steps: int, muon: MuonConfig) -> float:
    """Momentum at `step`: a line from `momentum_start` over the warm-up, `momentum`, and a line back at the end."""
    share, cooldown = muon.momentum_warmup_share, muon.momentum_cooldown_share * steps
    warmup = muon.momentum_warmup_steps if share is None else share * steps
    rise, risen = (step, warmup) if step < warmup else (1.0, 1.0)
    if steps - step < cooldown and (steps - step) * risen < cooldown * rise:
        rise, risen = steps - step, cooldown
    if rise == risen:
        return muon.momentum
    return muon.momentum_start + (muon.momentum - muon.momentum_start) * rise / risen


def scaled_to(optim: OptimConfig, steps_before: int, steps_after: int) -> OptimConfig:
    """The same recipe for a run of another length: warm-up and a cool-down in steps keep their proportion, a share is
    one already.

    A momentum warm-up in steps stays as it is: a matter of the first gradients, not of the length of the run."""
    rates, factor = optim.schedule, steps_after / steps_before
    cooldown = None if rates.cooldown_steps is None else max(1, round(rates.cooldown_steps * factor))
    warmup = min(round(rates.warmup_steps * factor), steps_after - 1)
    if (cooldown, warmup) == (rates.cooldown_steps, rates.warmup_steps):
        return optim
    return replace(optim, schedule=replace(rates, cooldown_steps=cooldown, warmup_steps=warmup))
