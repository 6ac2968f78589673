"""What `paceline evaluate` found out about checkpoints, and the loss by place in the document."""

import math
from typing import Any

from paceline.metrics.card import POSITION_COLUMNS, Evaluation
from paceline.report.facts import UNKNOWN
from paceline.report.markup import Markup, Node, element
from paceline.report.runs import Run
from paceline.report.subject import Subject
from paceline.report.tables import folded, scrolling

KINDS = {"validation": "validation data", "text": "text", "hellaswag": "HellaSwag", "task": "task"}


def evaluations(subject: Subject) -> list[Node]:
    judged = [(run, one) for run in subject.runs for one in run.card.evaluations]
    if not judged:
        return []
    headings = ("Run", "What", "Step", "Figures")
    rows = [[run.label, f"{KINDS[one.kind]} {one.name}", f"{one.step:,}", _figures(one)] for run, one in judged]
    places = [_places(run, one) for run, one in judged if one.positions]
    return [
        element("h2", "Judged after training"),
        *folded(f"{len(rows)} evaluations", [scrolling(headings, rows, label="Evaluations")]),
        *folded("Loss by place in the document", places),
    ]


def _figures(one: Evaluation) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {_number(value)}" for name, value in one.figures.items())


def _number(value: Any) -> str:
    if type(value) is int:
        return f"{value:,}"
    return f"{value:.4f}" if isinstance(value, float) and math.isfinite(value) else UNKNOWN


def _places(run: Run, one: Evaluation) -> Markup:
    title = f"Loss by place in the document: {run.label}, {one.name}"
    rows = [_bucket(dict(zip(POSITION_COLUMNS, row, strict=False))) for row in one.positions]
    table = scrolling(("Tokens before", "Window", "Tokens", "Loss"), rows, label=title)
    return element("details", element("summary", title), table)


def _bucket(bucket: dict[str, Any]) -> list[Node]:
    first, last = (_number(bucket.get(name)) for name in ("first", "last"))
    inside = "inside" if bucket.get("inside_window") else "beyond"
    return [f"{first} to {last}", inside, _number(bucket.get("tokens")), _number(bucket.get("loss"))]
