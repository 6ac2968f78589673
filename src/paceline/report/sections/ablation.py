"""An ablation: from one preset to the next as a waterfall, and what each technique did, with its interval."""

from paceline.analysis.ablation import Ablation, Difference, Effect
from paceline.analysis.facts import UNKNOWN
from paceline.report.markup import Node, chart, details, element, stacked
from paceline.report.subject import Subject
from paceline.report.summary_text import p_value

HEADINGS = (
    "Technique", "Kind", "Seeds", "Δ loss", "95 % interval", "p (Holm)", "Δ time at equal loss", "Δ step", "Δ memory",
)  # fmt: skip
SIGNS = "Each Δ is with the technique minus without it, so a negative Δ loss helps. p is corrected for their number."


def ablations(subject: Subject) -> list[Node]:
    return [node for number, ablation in enumerate(subject.ablations) for node in _ablation(number, ablation)]


def _ablation(number: int, ablation: Ablation) -> list[Node]:
    scale = "" if ablation.scale is None else f" at scale {ablation.scale}"
    seeds = f"seeds {', '.join(map(str, ablation.seeds))} in every arm"
    made = f"{ablation.steps:,} steps{scale}, {seeds}, {ablation.hardware}, {ablation.made[:10]}."
    indicative = f"Indicative only ({ablation.why_indicative}): it settles no claim about the full size."
    return [
        element("h2", f"What each technique does: {ablation.title}"),
        element("p", made, class_="quiet"),
        element("p", indicative, class_="unfinished") if ablation.indicative else None,
        *_waterfall(number, ablation),
        *_effects(number, ablation),
        *(element("p", f"Without an arm: {one.arm} {one.why}.", class_="quiet small") for one in ablation.left_out),
        *(element("p", f"Not counted: {one.run}: {one.why}.", class_="quiet small") for one in ablation.not_counted),
    ]


def _waterfall(number: int, ablation: Ablation) -> list[Node]:
    if not any(arm.kind == "base" for arm in ablation.arms):  # the predecessor was not asked for
        return []
    if not ablation.waterfall:
        return [element("p", "One of the two presets has no finished run, so there is no way from one to the other.")]
    rows = [(bar.label, [bar.shown]) for bar in ablation.waterfall]
    table = stacked(("From and to", "Loss or change of it"), rows)
    return [
        element("h3", "Loss, from one preset to the next"),
        chart(f"waterfall-{number}", "Waterfall of the loss; the table below has the values"),
        details("As a table", table),
    ]


def _effects(number: int, ablation: Ablation) -> list[Node]:
    if not ablation.effects:
        return []
    signs = SIGNS
    if (rate := ablation.exchange) is not None:
        signs += f" At step {rate.at_step:,.0f}, a hundredth of loss is worth {rate.steps_per_loss * 0.01:,.1f} steps."
    return [
        element("h3", "Effects on the loss, with their 95 % intervals"),
        chart(f"effects-{number}", "Effects with intervals; the table below has the values"),
        stacked(HEADINGS, [_effect_row(effect) for effect in ablation.effects]),
        element("p", signs, class_="quiet small"),
        element("ul", *(element("li", effect.words) for effect in ablation.effects), class_="plain"),
    ]


def _effect_row(effect: Effect) -> tuple[Node, list[Node]]:
    loss = effect.loss
    tested = loss.p_holm is not None  # of one seed nothing is known
    name = element("span", effect.title, element("em", " no measurable effect") if effect.noise and tested else None)
    corrected = UNKNOWN if loss.p_holm is None else p_value(loss.p_holm)
    cells: list[Node] = [effect.kind, f"{effect.n}", f"{loss.mean:+.4f}", _interval(loss, 4), corrected]
    costs = (effect.time_at_equal_loss_s, "s", 1), (effect.step_s, "s", 4), (effect.memory_gib, "GiB", 2)
    return name, [*cells, *(_delta(*cost) for cost in costs)]


def _interval(estimate: Difference, digits: int) -> str:
    if estimate.low is None or estimate.high is None:
        return "one seed only"
    return f"{estimate.low:+.{digits}f} to {estimate.high:+.{digits}f}"


def _delta(estimate: Difference | None, unit: str, digits: int) -> str:
    if estimate is None:
        return UNKNOWN
    return f"{estimate.mean:+.{digits}f} {unit} ({_interval(estimate, digits)})"
