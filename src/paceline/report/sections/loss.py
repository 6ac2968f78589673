"""Loss curves over four axes and as tables, what `paceline evaluate` found, schedule and speed, and samples."""

import math
from typing import Any

from paceline.analysis.facts import UNKNOWN, number, seconds
from paceline.analysis.groups import Group
from paceline.metrics.card import POSITION_COLUMNS, Evaluation, window_side
from paceline.report.charts import SMALL_CHARTS, START_SHARE, loss_points, small_charts
from paceline.report.markup import OPEN_ROWS, Markup, Node, chart, details, element, folded, scrolling
from paceline.report.subject import Run, Subject

TABS = {"step": "Steps", "tokens": "Tokens", "train": "Train time", "wall": "Wall time"}
KINDS = {"validation": "validation data", "text": "text", "hellaswag": "HellaSwag", "task": "task"}


def loss(subject: Subject) -> list[Node]:
    if not any(len(run.curves.steps["step"]) or len(run.curves.evals["step"]) for run in subject.runs):
        return [element("h2", "Loss"), element("p", "Nothing is recorded yet.", class_="quiet")]
    drawn = element("div", id="loss", class_="chart", role="img", aria_label="Loss curves; the tables have the values")
    several = any(len(group.members) > 1 for group in subject.groups)
    switches = [
        element("label", element("input", type="checkbox", id=name), text, class_="switch")
        for name, text in {"whole": "Show the whole range", **({"each": "Show each run"} if several else {})}.items()
    ]
    return [
        element("h2", "Loss"),
        element(
            "div",
            _tabs(),
            element("div", drawn, id="loss-panel", role="tabpanel", aria_labelledby="axis-step"),
            element("div", id="legend", role="group", aria_label="Groups shown") if not subject.only else None,
            *switches,
            class_="panel",
        ),
        element("p", _how_drawn(subject, several), class_="quiet small"),
        element("noscript", element("p", "The charts need JavaScript; the tables have the validation losses.")),
    ]


def _how_drawn(subject: Subject, several: bool) -> str:
    said = [
        "The training loss is smoothed; marks are validations. The frame is that of the losses after the first "
        f"{100 * START_SHARE:.0f}\u00a0% of a run, without outliers."
    ]
    if several:
        said.append(
            "Of a group its mean is drawn, with a band from the lowest to the highest of its finished runs; thin lines "
            "are runs that are not in the mean."
        )
    points = loss_points(len(subject.runs))
    if any(len(run.curves.steps["step"]) > points for run in subject.runs):
        said.append(
            f"Long curves are thinned to {points:,} points: of each stretch the lowest and the "
            f"highest, so that no spike is lost. Means and tables are from all steps."
        )
    return " ".join(said)


def _tabs() -> Markup:
    buttons = [
        element(
            "button", text, type="button", role="tab", id=f"axis-{name}", data_axis=name, aria_controls="loss-panel",
            aria_selected=str(name == "step").lower(), tabindex="0" if name == "step" else "-1",
        )
        for name, text in TABS.items()
    ]  # fmt: skip
    return element("div", *buttons, class_="tabs", role="tablist", aria_label="Loss over")


def validations(subject: Subject) -> list[Node]:
    if subject.only:
        return [_table_of_run(subject.only)]
    tables = [_table_of_group(group) for group in subject.groups]
    return folded("Validations as tables", tables, most=OPEN_ROWS if subject.folder is None else 0)


def _table_of_run(run: Run) -> Markup | None:
    if not run.card.losses:
        return None
    titles = ("Step", "Validation loss", "Bits per byte", "Train time", "Wall time")
    rows = [
        [number(step, ",.0f"), number(val_loss, ".4f"), number(val_bpb, ".4f"), seconds(train_s), seconds(wall_s)]
        for step, val_loss, val_bpb, train_s, wall_s in (row for row in run.card.losses if len(row) == len(titles))
    ]
    return details("Validation as a table", scrolling(titles, rows, label="Validation"))


def _table_of_group(group: Group[Run]) -> Markup | None:
    """A row per step at which any of them was validated."""
    losses = [dict(zip(r.curves.evals["step"], r.curves.evals["val_loss"], strict=True)) for r in group.members]
    steps = sorted({step for one in losses for step in one})
    if not steps:
        return None
    headings = ["Step", *(f"seed {run.card.seed}" for run in group.members)]
    rows = [[f"{step:,.0f}", *(_number(one.get(step)) for one in losses)] for step in steps]
    title = f"Validation as a table: {group.label}"
    return details(title, scrolling(headings, rows, label=title))


def evaluations(subject: Subject) -> list[Node]:
    judged = [(run, one) for run in subject.runs for one in run.card.evaluations]
    if not judged:
        return []
    headings = ("Run", "What", "Step", "Figures")
    rows = []
    for run, one in judged:
        said = ", ".join(f"{name.replace('_', ' ')} {_number(value)}" for name, value in one.figures.items())
        rows.append([run.label, f"{KINDS[one.kind]} {one.name}", f"{one.step:,}", said])
    places = [_places(run, one) for run, one in judged if one.positions]
    return [
        element("h2", "Judged after training"),
        *folded(f"{len(rows)} evaluations", [scrolling(headings, rows, label="Evaluations")]),
        *folded("Loss by place in the document", places),
    ]


def _number(value: Any) -> str:
    if type(value) is int:
        return f"{value:,}"
    return f"{value:.4f}" if isinstance(value, float) and math.isfinite(value) else UNKNOWN


def _places(run: Run, one: Evaluation) -> Markup:
    title = f"Loss by place in the document: {run.label}, {one.name}"
    rows = []
    for row in one.positions:
        bucket = dict(zip(POSITION_COLUMNS, row, strict=False))
        first, last = (_number(bucket.get(name)) for name in ("first", "last"))
        start, sequence = bucket.get("first"), one.of.get("sequence_tokens")
        side = "inside" if bucket.get("inside_window") else "beyond"
        if isinstance(start, int) and isinstance(sequence, int) and start >= sequence:  # of older cards, too
            side = window_side(start, None, sequence)
        rows.append([f"{first} to {last}", side, _number(bucket.get("tokens")), _number(bucket.get("loss"))])
    table = scrolling(("Tokens before", "Window", "Tokens", "Loss"), rows, label=title)
    return details(title, table)


def schedule(subject: Subject) -> list[Node]:
    drawn = {name for group in subject.groups for name in small_charts(group, len(subject.groups))}
    kinds = sorted(name.removeprefix("window-") for name in drawn - set(SMALL_CHARTS))
    titles = SMALL_CHARTS | {f"window-{kind}": f"{kind.capitalize()} attention window (tokens)" for kind in kinds}
    panels = [chart(name, title, heading=element("h3", title)) for name, title in titles.items() if name in drawn]
    return [element("h2", "Schedule and speed, by step"), element("div", *panels, class_="row")] if drawn else []


def samples(subject: Subject) -> list[Node]:
    written = {
        run.label: element("div", element("pre", run.card.sample, class_="sample"), class_="panel")
        for run in subject.runs
        if run.card.sample
    }
    if not written:
        return []
    if subject.only:
        return [element("h2", "What the model wrote"), *written.values()]
    texts = [details(label, text) for label, text in written.items()]
    return [element("h2", "What the models wrote"), *folded(f"{len(written)} samples", texts)]
