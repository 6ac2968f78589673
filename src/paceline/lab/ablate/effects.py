"""From the runs of an ablation to its result: effects with intervals, the exchange rate, the waterfall. No torch.

An effect is (with the part) minus (without it), over the seeds that both arms have: leaving out compares `full` with
`without X`, adding alone compares `with X` with `base`. Within each quantity p-values are corrected for the number of
effects (Holm). Times are compared where all runs of both arms had the same hardware. Parts interact, so their effects
do not sum to the whole difference: a step of the waterfall is the mean of a part's, and the rest a bar of its own.
"""

import statistics as basic
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from paceline.analysis.ablation import Ablation, Arm, Bar, Difference, Effect, Exchange, LeftOutArm
from paceline.analysis.facts import hardware
from paceline.analysis.runs import LeftOut, Validation, validations
from paceline.analysis.statistics import Curve, Estimate, exchange_rate, holm, paired, time_at_equal_loss
from paceline.lab.ablate import arms
from paceline.lab.ablate.outcomes import Outcome
from paceline.metrics.card import RunCard, now
from paceline.recipes.presets import preset
from paceline.settings.run import RunConfig

LEVEL = 0.05  # an effect whose corrected p-value is not below this is called noise
GIB = 2**30
Quantity = Callable[[RunCard], float | None]
QUANTITIES = ("loss", "time_at_equal_loss_s", "step_s", "memory_gib")


@dataclass(frozen=True)
class ArmResult:
    arm: arms.Arm
    folders: tuple[str, ...]  # of its finished runs
    cards: Mapping[int, RunCard]  # the same by seed


def conclude(plan: arms.Plan, found: Sequence[Outcome], failed: Mapping[str, str]) -> Ablation:
    """What the finished runs say; `failed` has reasons for some of the others."""
    results = _results(plan, found)
    compared = [effect for result in results.values() if (effect := _effect(result, results)) is not None]
    effects = [_judged(effect) for effect in _corrected(compared)]
    cards = [card for result in results.values() for card in result.cards.values()]
    # small models and slow machines point at an answer for the full size; they do not give it
    small = [f"scale {plan.choice.scale}"] if plan.choice.scale != "1" else _shrunk(plan.full)
    small += ["CPU"] if any(card.device == "cpu" for card in cards) else []
    against, newer = plan.names
    others = sorted((one for one in found if one.state != "finished"), key=lambda one: one.state != "refused")
    reasons = {one.run.name: one.reason or failed.get(one.run.name, "is not finished") for one in others}
    return Ablation(
        preset=newer,
        against=against,
        scale=None if plan.choice.scale == "1" else plan.choice.scale,
        indicative=bool(small),
        why_indicative=", ".join(small) or None,
        steps=plan.full.steps,
        seeds=tuple(plan.seeds),
        hardware=", ".join(sorted({hardware(card) for card in cards})),
        made=now(),
        arms=tuple(_written(result) for result in results.values()),
        left_out=tuple(LeftOutArm(arm=name, why=why) for name, why in plan.left_out),
        not_counted=tuple(LeftOut(run=name, why=why) for name, why in reasons.items()),
        effects=tuple(effects),
        waterfall=tuple(waterfall(plan, results, effects)),
        exchange=exchange_of(results.get("full")),
    )


def _results(plan: arms.Plan, found: Sequence[Outcome]) -> dict[str, ArmResult]:
    """Finished runs by arm; not the arms that have none."""
    results = {}
    for arm in plan.arms:
        finished = [one for one in found if one.run.arm == arm.name and one.state == "finished"]
        if cards := {one.run.seed: one.card for one in finished if one.card is not None}:
            results[arm.name] = ArmResult(arm, tuple(one.run.name for one in finished), cards)
    return results


def _written(result: ArmResult) -> Arm:
    arm, losses = result.arm, tuple(card.val_loss for card in result.cards.values())
    technique = arm.part.key if arm.part else None
    return Arm(name=arm.name, kind=arm.kind, technique=technique, runs=result.folders, losses=losses)


def _shrunk(config: RunConfig) -> list[str]:
    usual = preset(config.preset)
    sizes = {
        "width": (config.model.width, usual.model.width),
        "layers": (config.model.num_layers, usual.model.num_layers),
        "tokens a step": (config.batch.tokens, usual.batch.tokens),
    }
    return [f"{name} {size:,} instead of {full:,}" for name, (size, full) in sizes.items() if size < full]


def _effect(result: ArmResult, results: Mapping[str, ArmResult]) -> Effect | None:
    """None: it adds or leaves out nothing, or the arm it is compared with has no run of the same seed."""
    leaves, part = result.arm.kind == "without", result.arm.part
    other = results.get("full" if leaves else "base")
    if part is None or other is None:
        return None
    having, lacking = (other, result) if leaves else (result, other)
    seeds = [seed for seed in having.cards if seed in lacking.cards]
    if not seeds:
        return None
    a, b = ([arm.cards[seed] for seed in seeds] for arm in (having, lacking))
    alike = len({hardware(card) for card in (*a, *b)}) == 1

    def step_s(card: RunCard) -> float | None:
        timed = card.steps - result.arm.config.train.untimed_steps
        return card.train_s / timed if card.train_s and timed > 0 else None

    loss = _difference(a, b, _loss)
    assert loss is not None  # finished runs have one
    return Effect(
        technique=part.key,
        title=part.title,
        kind="leave-one-out" if leaves else "add-one-in",
        n=len(seeds),
        loss=loss,
        time_at_equal_loss_s=_time_difference(a, b) if alike else None,
        step_s=_difference(a, b, step_s) if alike else None,
        memory_gib=_difference(a, b, lambda card: None if card.peak_bytes is None else card.peak_bytes / GIB),
        noise=True,
        words="",
    )


def _loss(card: RunCard) -> float:
    assert card.val_loss is not None  # `outcomes` refuses others
    return card.val_loss


def _difference(a: Sequence[RunCard], b: Sequence[RunCard], value: Quantity) -> Difference | None:
    with_, without = ([found for card in cards if (found := value(card)) is not None] for cards in (a, b))
    if len(with_) < len(a) or len(without) < len(b):
        return None
    return Difference(mean=with_[0] - without[0]) if len(a) == 1 else _as_difference(paired(with_, without))


def _as_difference(found: Estimate | None) -> Difference | None:
    return None if found is None else Difference(mean=found.mean, low=found.low, high=found.high, p=found.p)


def _time_difference(a: Sequence[RunCard], b: Sequence[RunCard]) -> Difference | None:
    if len(a) < 2:  # one pair: too little for a time between evaluations
        return None
    first, second = (_curves(cards, lambda _, validation: validation.train_s) for cards in (a, b))
    return _as_difference(time_at_equal_loss(first, second) if first and second else None)


def _curves(cards: Sequence[RunCard], at: Callable[[int, Validation], float]) -> list[Curve] | None:
    """Of each run the losses of the validations after step 0, over time or step; None if a number is missing."""
    tables = [validations(card) for card in cards]
    if any(len(table) < len(card.losses) for table, card in zip(tables, cards, strict=True)):
        return None
    later = [{step: one for step, one in table.items() if step} for table in tables]
    return [([at(*item) for item in table.items()], [one.loss for one in table.values()]) for table in later]


def _corrected(effects: Sequence[Effect]) -> list[Effect]:
    done = list(effects)
    for name in QUANTITIES:
        places = [i for i, one in enumerate(done) if (d := getattr(one, name)) is not None and d.p is not None]
        for place, p in zip(places, holm([getattr(done[i], name).p for i in places]), strict=True):
            done[place] = replace(done[place], **{name: replace(getattr(done[place], name), p_holm=p)})
    return done


def _judged(effect: Effect) -> Effect:
    noise = effect.loss.p_holm is None or effect.loss.p_holm >= LEVEL
    return replace(effect, noise=noise, words=_words(effect, noise))


def _words(effect: Effect, noise: bool) -> str:
    by = "by leaving it out" if effect.kind == "leave-one-out" else "by adding it alone"
    subject, loss = f"With {effect.technique} the loss", effect.loss
    if loss.low is None or loss.high is None or loss.p_holm is None:
        return f"{subject} changes by {loss.mean:+.4f} in one seed, {by}; one seed has no interval."
    if loss.mean == loss.low == loss.high == 0:
        return f"{subject} is the same to the last bit in {effect.n} seeds, {by}."
    interval = f"95 %: {loss.low:+.4f} to {loss.high:+.4f}, n = {effect.n}, p = {loss.p_holm:.2g} after Holm"
    doubt = "no measurable effect (interval includes 0)" if loss.low <= 0 <= loss.high else "not significant after Holm"
    return f"{subject} changes by {loss.mean:+.4f} ({interval}), {by}{f'; {doubt}' if noise else ''}."


def exchange_of(full: ArmResult | None) -> Exchange | None:
    """Steps that buy one unit of loss at the end of the full preset's mean curve; None: too few validations."""
    curves = _curves(list(full.cards.values()), lambda step, _: step) if full else None
    if full is None or not curves or any(steps != curves[0][0] for steps, _ in curves):
        return None
    means = [basic.fmean(losses) for losses in zip(*(losses for _, losses in curves), strict=True)]
    at = full.arm.config.steps
    rate = exchange_rate(curves[0][0], means, at)
    return None if rate is None else Exchange(steps_per_loss=rate, at_step=at)


def waterfall(plan: arms.Plan, results: Mapping[str, ArmResult], effects: Sequence[Effect]) -> list[Bar]:
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
    rest = "interaction and what was not run" if missing else "interaction"
    return [
        Bar(label=plan.names[0], value=start, kind="start"),
        *(Bar(label=part, value=value, kind="step") for part, value in steps.items()),
        Bar(label=rest, value=end - start - sum(steps.values()), kind="interaction"),
        Bar(label=plan.names[1], value=end, kind="end"),
    ]
