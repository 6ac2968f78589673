"""The loss curves over four axes, their values as tables, and the schedule beside the speed."""

from collections.abc import Sequence

import numpy as np

from paceline.metrics.card import LOSS_COLUMNS
from paceline.report.charts import is_thinned, loss_points
from paceline.report.facts import UNKNOWN, number, seconds
from paceline.report.groups import Group
from paceline.report.markup import Markup, Node, element
from paceline.report.runs import Run
from paceline.report.subject import Subject
from paceline.report.tables import folded, scrolling

TABS = {"step": "Steps", "tokens": "Tokens", "train": "Train time", "wall": "Wall time"}
TABLED_SEEDS = 8
"""Columns of a table of validations; a larger group has its mean, lowest and highest instead."""


def loss(subject: Subject) -> list[Node]:
    if not any(len(run.curves.steps["step"]) or len(run.curves.evals["step"]) for run in subject.runs):
        return [element("h2", "Loss"), element("p", "Nothing is recorded yet.", class_="quiet")]
    chart = element("div", id="loss", class_="chart", role="img", aria_label="Loss curves; the tables have the values")
    return [
        element("h2", "Loss"),
        element(
            "div",
            _tabs(),
            element("div", chart, id="loss-panel", role="tabpanel", aria_labelledby="axis-step"),
            element("div", id="legend", role="group", aria_label="Groups shown") if not subject.only else None,
            *_switches(subject),
            class_="panel",
        ),
        element("p", _how_drawn(subject), class_="quiet small"),
        element("noscript", element("p", "The charts need JavaScript; the tables have the validation losses.")),
    ]


def _switches(subject: Subject) -> list[Markup]:
    whole = element("input", type="checkbox", id="whole")
    switches = [element("label", whole, "Show the first steps too", class_="switch")]
    if any(len(group.runs) > 1 for group in subject.groups):
        each = element("input", type="checkbox", id="each")
        switches.append(element("label", each, "Show each run", class_="switch"))
    return switches


def _how_drawn(subject: Subject) -> str:
    """What a line is: needed to read it rightly."""
    said = ["The training loss is smoothed; marks are validations."]
    if any(len(group.runs) > 1 for group in subject.groups):
        said.append(
            "Of a group its mean is drawn, with a band from the lowest to the highest of its finished runs; thin lines "
            "are runs that are not in the mean."
        )
    if is_thinned(subject.runs):
        said.append(
            f"Long curves are thinned to {loss_points(len(subject.runs)):,} points: of each stretch the lowest and the "
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
    return folded("Validations as tables", [_table_of_group(group) for group in subject.groups])


def _table_of_run(run: Run) -> Markup | None:
    if not run.card.losses:
        return None
    titles = ("Step", "Validation loss", "Bits per byte", "Train time", "Wall time")
    forms = (",.0f", ".4f", ".4f", None, None)
    rows = [
        [_cell(value, form) for value, form in zip(row, forms, strict=True)]
        for row in run.card.losses
        if len(row) == len(LOSS_COLUMNS)
    ]
    return element("details", element("summary", "Validation as a table"), scrolling(titles, rows, label="Validation"))


def _cell(value: float | None, form: str | None) -> str:
    return seconds(value) if form is None else number(value, form)


def _table_of_group(group: Group) -> Markup | None:
    """A row per step at which any of them was validated."""
    losses = [dict(zip(r.curves.evals["step"], r.curves.evals["val_loss"], strict=True)) for r in group.runs]
    steps = sorted({step for one in losses for step in one})
    if not steps:
        return None
    every = {step: [one.get(step, np.nan) for one in losses] for step in steps}
    if len(group.runs) <= TABLED_SEEDS:
        headings = ["Step", *(f"seed {run.card.seed}" for run in group.runs)]
        rows = [[f"{step:,.0f}", *map(_loss, values)] for step, values in every.items()]
    else:
        headings = ["Step", "Runs", "Mean", "Lowest", "Highest"]
        rows = [[f"{step:,.0f}", *_summary(np.array(values))] for step, values in every.items()]
    title = f"Validation as a table: {group.label}"
    return element("details", element("summary", title), scrolling(headings, rows, label=title))


def _loss(value: float) -> str:
    return UNKNOWN if np.isnan(value) else f"{value:.4f}"


def _summary(values: np.ndarray) -> list[str]:
    there = values[~np.isnan(values)]
    if not len(there):
        return ["0", *[UNKNOWN] * 3]
    return [f"{len(there)}", *map(_loss, (there.mean(), there.min(), there.max()))]


def schedule(subject: Subject) -> list[Node]:
    steps = [run.curves.steps for run in subject.runs]
    titles = {
        "window": ("Attention window (tokens)", any((s["window_tokens"] > 0).any() for s in steps)),
        "lr": ("Learning-rate multiplier", any(len(s["step"]) for s in steps)),
        "rate": ("Tokens per second", any((s["tokens_per_s"] > 0).any() for s in steps)),
        "allocated": ("Memory allocated on the GPU (GiB)", any((s["allocated_bytes"] > 0).any() for s in steps)),
    }
    shown = {name: title for name, (title, is_there) in titles.items() if is_there}
    return [element("h2", "Schedule and speed, by step"), _small_charts(shown)] if shown else []


def _small_charts(titles: dict[str, str]) -> Markup:
    panels = [
        element("div", element("h3", title), element("div", id=name, class_="chart", role="img", aria_label=title),
                class_="panel")
        for name, title in titles.items()
    ]  # fmt: skip
    return element("div", *panels, class_="row")


def samples(runs: Sequence[Run]) -> list[Node]:
    written = [run for run in runs if run.card.sample]
    if not written:
        return []
    if len(runs) == 1:
        return [element("h2", "What the model wrote"), _sample(runs[0])]
    texts = [element("details", element("summary", run.label), _sample(run)) for run in written]
    return [element("h2", "What the models wrote"), *folded(f"{len(written)} samples", texts)]


def _sample(run: Run) -> Markup:
    return element("div", element("pre", run.card.sample, class_="sample"), class_="panel")
