"""An ablation: from one preset to the next as a waterfall, and what each technique did, with its interval."""

from collections.abc import Sequence

from paceline.report.ablation import Ablation, Effect, Estimated
from paceline.report.facts import UNKNOWN
from paceline.report.markup import Markup, Node, element
from paceline.report.tables import stacked
from paceline.report.words import p_value

HEADINGS = (
    "Technique", "Kind", "Seeds", "Δ loss", "95 % interval", "p (Holm)", "Δ time at equal loss", "Δ step", "Δ memory",
)  # fmt: skip
SIGNS = "Each Δ is with the technique minus without it, so a negative Δ loss helps. p is corrected for their number."


def ablations(found: Sequence[Ablation]) -> list[Node]:
    return [node for number, ablation in enumerate(found) for node in _ablation(number, ablation)]


def _ablation(number: int, ablation: Ablation) -> list[Node]:
    return [
        element("h2", f"What each technique does: {ablation.preset} against {ablation.against}"),
        element("p", _setting(ablation), class_="quiet"),
        _indicative(ablation),
        *_waterfall(number, ablation),
        *_effects(number, ablation),
        *(element("p", f"Without an arm: {one.arm} {one.why}.", class_="quiet small") for one in ablation.left_out),
        *(element("p", f"Not counted: {one.run}: {one.why}.", class_="quiet small") for one in ablation.not_counted),
    ]


def _setting(ablation: Ablation) -> str:
    scale = "" if ablation.scale is None else f" at scale {ablation.scale}"
    seeds = ", ".join(map(str, ablation.seeds))
    return f"{ablation.steps:,} steps{scale}, seeds {seeds} in every arm, {ablation.hardware}, {ablation.made[:10]}."


def _indicative(ablation: Ablation) -> Markup | None:
    if not ablation.indicative:
        return None
    why = f" ({ablation.why_indicative})" if ablation.why_indicative else ""
    return element("p", f"Indicative only{why}: it settles no claim about the full size.", class_="unfinished")


def _exchange(ablation: Ablation) -> str:
    if ablation.exchange is None:
        return ""
    steps = ablation.exchange.steps_per_loss * 0.01
    return f" At step {ablation.exchange.at_step:,.0f}, a hundredth of loss is worth {steps:,.1f} steps."


def _waterfall(number: int, ablation: Ablation) -> list[Node]:
    if not ablation.waterfall:
        return [element("p", "One of the two presets has no finished run, so there is no way from one to the other.")]
    rows = [
        (bar.label, [f"{bar.value:.4f}" if bar.kind in ("start", "end") else f"{bar.value:+.4f}"])
        for bar in ablation.waterfall
    ]
    table = stacked(("From and to", "Loss or change of it"), rows)
    return [
        element("h3", "Loss, from one preset to the next"),
        _chart(f"waterfall-{number}", "Waterfall of the loss; the table below has the values"),
        element("details", element("summary", "As a table"), table),
    ]


def _effects(number: int, ablation: Ablation) -> list[Node]:
    if not ablation.effects:
        return []
    return [
        element("h3", "Effects on the loss, with their 95 % intervals"),
        _chart(f"effects-{number}", "Effects with intervals; the table below has the values"),
        stacked(HEADINGS, [_effect_row(effect) for effect in ablation.effects]),
        element("p", SIGNS + _exchange(ablation), class_="quiet small"),
        element("ul", *(element("li", effect.words) for effect in ablation.effects), class_="plain"),
    ]


def _effect_row(effect: Effect) -> tuple[Node, list[Node]]:
    loss = effect.loss
    name = element("span", effect.title, element("em", " may be chance") if effect.noise else None)
    corrected = UNKNOWN if loss.p_holm is None else p_value(loss.p_holm)
    cells: list[Node] = [effect.kind, f"{effect.n}", f"{loss.mean:+.4f}", _interval(loss, 4), corrected]
    return name, [
        *cells,
        _delta(effect.time_at_equal_loss_s, "s", 1),
        _delta(effect.step_s, "s", 4),
        _delta(effect.memory_gib, "GiB", 2),
    ]


def _interval(estimate: Estimated, digits: int) -> str:
    if estimate.low is None or estimate.high is None:
        return "one seed only"
    return f"{estimate.low:+.{digits}f} to {estimate.high:+.{digits}f}"


def _delta(estimate: Estimated | None, unit: str, digits: int) -> str:
    if estimate is None:
        return UNKNOWN
    return f"{estimate.mean:+.{digits}f} {unit} ({_interval(estimate, digits)})"


def _chart(name: str, label: str) -> Markup:
    return element("div", element("div", id=name, class_="chart", role="img", aria_label=label), class_="panel")
