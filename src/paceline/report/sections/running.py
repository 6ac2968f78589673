"""What is trained now, on top of the live page: how far it is, and how long it still takes."""

from paceline.metrics.meter import seconds_left
from paceline.report.facts import UNKNOWN, number, seconds
from paceline.report.markup import Node, element
from paceline.report.runs import Run
from paceline.report.sections.results import figures
from paceline.report.subject import Subject
from paceline.report.tables import stacked

HEADINGS = ("Run", "Step", "Training loss", "Validation loss", "Tokens per second", "Left")


def running(subject: Subject) -> list[Node]:
    """Nothing of a run that has the page to itself: its figures are on top anyway."""
    if not subject.running or (subject.only and not subject.ablations):
        return []
    rows = [(run.label, _row(run)) for run in subject.running]
    return [element("h2", "Running now"), stacked(HEADINGS, rows)]


def _row(run: Run) -> list[Node]:
    smooth, rates = run.smooth_loss[-1:].tolist(), run.curves.steps["tokens_per_s"][-1:].tolist()
    tokens_per_step = run.config.get("batch.tokens")
    rate = next((rate for rate in rates if rate > 0), None)
    left_s = None
    if rate is not None and isinstance(tokens_per_step, int):
        left_s = seconds_left(run.card.steps - run.steps_done, tokens_per_step, rate)
    return [
        f"{run.steps_done:,} of {run.card.steps:,}",
        next((f"{loss:.4f}" for loss in smooth if loss == loss), UNKNOWN),
        figures(run)["Validation loss"][0],
        number(rate, ",.0f"),
        seconds(left_s),
    ]
