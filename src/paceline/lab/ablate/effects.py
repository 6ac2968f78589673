"""What an ablation found: effects with intervals, the exchange rate, the waterfall. No torch.

An effect is (with the part) minus (without it), over the seeds that both arms have: leaving out compares `full` with
`without X`, adding alone compares `with X` with `base`. Within each quantity p-values are corrected for the number of
effects (Holm). The two kinds of effect do not sum to the whole difference, since parts interact: a step of the
waterfall is the mean of a part's effects, and what is left is a bar of its own.
"""

import statistics as basic
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from paceline.lab.ablate.outcomes import Outcome
from paceline.lab.ablate.plan import Arm, Plan
from paceline.lab.statistics import exchange_rate, holm, paired, time_at_equal_loss
from paceline.metrics.card import LOSS_COLUMNS, RunCard

NOISE_P = 0.05
"""A difference whose corrected p-value is not below this is not told apart from noise."""
GIB = 2**30
QUANTITIES = ("loss", "time_at_equal_loss_s", "step_s", "memory_gib")
STEP, VAL_LOSS, TRAIN_S = (LOSS_COLUMNS.index(name) for name in ("step", "val_loss", "train_s"))

Comparison = Literal["leave-one-out", "add-one-in"]
Cards = Mapping[int, RunCard]
"""Of an arm, by seed."""


@dataclass(frozen=True)
class Difference:
    mean: float
    low: float | None = None
    high: float | None = None
    p: float | None = None
    p_holm: float | None = None
    """None: one seed alone has no interval."""


@dataclass(frozen=True)
class Effect:
    technique: str
    title: str
    kind: Comparison
    n: int
    loss: Difference
    time_at_equal_loss_s: Difference | None
    step_s: Difference | None
    memory_gib: Difference | None

    @property
    def noise(self) -> bool:
        """Whether the loss does not differ as far as these runs can tell."""
        return self.loss.p_holm is None or self.loss.p_holm >= NOISE_P

    @property
    def words(self) -> str:
        by = "by leaving it out" if self.kind == "leave-one-out" else "by adding it alone"
        subject, loss = f"With {self.technique} the loss", self.loss
        if loss.low is None or loss.high is None or loss.p_holm is None:
            return f"{subject} changes by {loss.mean:+.4f} in one seed, {by}; one seed has no interval."
        if loss.mean == loss.low == loss.high == 0:
            return f"{subject} is the same to the last bit in {self.n} seeds, {by}."
        interval = f"95 %: {loss.low:+.4f} to {loss.high:+.4f}, n = {self.n}, p = {loss.p_holm:.2g} after Holm"
        doubt = "; not told apart from noise" if self.noise else ""
        return f"{subject} changes by {loss.mean:+.4f} ({interval}), {by}{doubt}."


@dataclass(frozen=True)
class ArmResult:
    arm: Arm
    rate: float
    """Factor on its rates at which it is judged."""
    tried: Mapping[float, float]
    """Mean loss at every factor."""
    cards: Cards
    folders: Mapping[int, str]


def arm_results(plan: Plan, found: Sequence[Outcome]) -> dict[str, ArmResult]:
    """Finished runs by arm, each arm at its best rate."""
    by_arm: dict[str, dict[float, dict[int, Outcome]]] = {}
    for one in found:
        if one.state == "finished":
            by_arm.setdefault(one.run.arm, {}).setdefault(one.run.rate, {})[one.run.seed] = one
    return {arm.name: _at_best_rate(arm, by_arm[arm.name]) for arm in plan.arms if arm.name in by_arm}


def _at_best_rate(arm: Arm, by_rate: Mapping[float, Mapping[int, Outcome]]) -> ArmResult:
    """The lowest mean loss decides, among rates that have every seed of the arm: a rate that lost its worst run would
    look better than it is. If none has them all, the rate nearest to the arm's own is taken."""
    tried = {rate: basic.fmean(_loss(one.card) for one in runs.values()) for rate, runs in by_rate.items()}
    seeds = {seed for runs in by_rate.values() for seed in runs}
    nearest = sorted(by_rate, key=lambda rate: abs(rate - 1))
    best = min((rate for rate in nearest if by_rate[rate].keys() == seeds), key=tried.__getitem__, default=nearest[0])
    chosen = by_rate[best]
    cards = {seed: one.card for seed, one in chosen.items() if one.card}
    return ArmResult(arm, best, tried, cards, {seed: one.run.name for seed, one in chosen.items()})


def effects_of(results: Mapping[str, ArmResult]) -> list[Effect]:
    """In the order of the arms, corrected for their number."""
    found = [_effect(result, results) for result in results.values() if result.arm.part is not None]
    return _corrected([effect for effect in found if effect is not None])


def _effect(result: ArmResult, results: Mapping[str, ArmResult]) -> Effect | None:
    """None: the arm it is compared with has no run of the same seed."""
    leaves = result.arm.kind == "without"
    other = results.get("full" if leaves else "base")
    part = result.arm.part
    if other is None or part is None:
        return None
    having, lacking = (other, result) if leaves else (result, other)
    seeds = [seed for seed in having.cards if seed in lacking.cards]
    if not seeds:
        return None
    a, b = ([arm.cards[seed] for seed in seeds] for arm in (having, lacking))
    free = result.arm.config.train.free_steps
    loss = _difference(a, b, _loss)
    assert loss is not None  # finished runs have one
    return Effect(
        technique=part.key,
        title=part.title,
        kind="leave-one-out" if leaves else "add-one-in",
        n=len(seeds),
        loss=loss,
        time_at_equal_loss_s=_time_difference(a, b),
        step_s=_difference(a, b, lambda card: _step_s(card, free)),
        memory_gib=_difference(a, b, lambda card: None if card.peak_bytes is None else card.peak_bytes / GIB),
    )


def _loss(card: RunCard | None) -> float:
    assert card is not None
    assert card.val_loss is not None  # `outcomes` refuses others
    return card.val_loss


def _step_s(card: RunCard, free_steps: int) -> float | None:
    timed = card.steps - free_steps
    return card.train_s / timed if card.train_s and timed > 0 else None


def _difference(
    a: Sequence[RunCard], b: Sequence[RunCard], value: Callable[[RunCard], float | None]
) -> Difference | None:
    pairs = [(value(x), value(y)) for x, y in zip(a, b, strict=True)]
    known = [(x, y) for x, y in pairs if x is not None and y is not None]
    if len(known) < len(pairs):
        return None
    if len(known) == 1:
        return Difference(known[0][0] - known[0][1])
    estimate = paired([x for x, _ in known], [y for _, y in known])
    return Difference(estimate.mean, estimate.low, estimate.high, estimate.p)


def _time_difference(a: Sequence[RunCard], b: Sequence[RunCard]) -> Difference | None:
    if len(a) < 2:  # one pair: too little for a time between evaluations
        return None
    curves = [[_curve(card, TRAIN_S) for card in cards] for cards in (a, b)]
    if None in curves[0] + curves[1]:
        return None
    estimate = time_at_equal_loss(*([curve for curve in group if curve is not None] for group in curves))
    return None if estimate is None else Difference(estimate.mean, estimate.low, estimate.high, estimate.p)


def _curve(card: RunCard, column: int) -> tuple[list[float], list[float]] | None:
    """Losses of the validations after step 0 over a column of theirs; None if a number is missing."""
    rows = [(row[column], row[VAL_LOSS]) for row in card.losses if row[STEP]]
    known = [(x, loss) for x, loss in rows if x is not None and loss is not None]
    return ([x for x, _ in known], [loss for _, loss in known]) if len(known) == len(rows) else None


def _corrected(effects: Sequence[Effect]) -> list[Effect]:
    """With p-values corrected within each quantity."""
    done = list(effects)
    for name in QUANTITIES:
        places = [i for i, one in enumerate(done) if (d := getattr(one, name)) is not None and d.p is not None]
        for place, p in zip(places, holm([getattr(done[i], name).p for i in places]), strict=True):
            done[place] = replace(done[place], **{name: replace(getattr(done[place], name), p_holm=p)})
    return done


def exchange_of(full: ArmResult | None) -> dict[str, float] | None:
    """Steps that buy one unit of loss at the end of the full preset's mean curve; None: too few validations."""
    curves = [_curve(card, STEP) for card in full.cards.values()] if full else []
    known = [curve for curve in curves if curve is not None]
    if full is None or len(known) < len(curves) or any(steps != known[0][0] for steps, _ in known):
        return None
    means = [basic.fmean(losses) for losses in zip(*(losses for _, losses in known), strict=True)]
    rate = exchange_rate(known[0][0], means, full.arm.config.steps)
    return None if rate is None else {"steps_per_loss": rate, "at_step": full.arm.config.steps}


def waterfall(plan: Plan, results: Mapping[str, ArmResult], effects: Sequence[Effect]) -> list[dict[str, Any]]:
    """From the predecessor's mean loss to the preset's, over the seeds that both have; empty if they have none."""
    base, full = results.get("base"), results.get("full")
    seeds = [seed for seed in full.cards if base and seed in base.cards] if full else []
    if base is None or full is None or not seeds:
        return []
    start, end = (basic.fmean(_loss(arm.cards[seed]) for seed in seeds) for arm in (base, full))
    by_part: dict[str, list[float]] = {}
    for effect in effects:
        by_part.setdefault(effect.technique, []).append(effect.loss.mean)
    steps = {part: basic.fmean(values) for part, values in by_part.items()}
    missing = not plan.whole or any(part.key not in steps for part in plan.parts)
    return [
        {"label": plan.names[0], "value": start, "kind": "start"},
        *({"label": part, "value": value, "kind": "step"} for part, value in steps.items()),
        {
            "label": "interaction and what was not run" if missing else "interaction",
            "value": end - start - sum(steps.values()),
            "kind": "interaction",
        },
        {"label": plan.names[1], "value": end, "kind": "end"},
    ]
