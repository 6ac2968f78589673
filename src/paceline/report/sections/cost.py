"""What it cost: where the wall time went, where a step goes, memory."""

from collections.abc import Sequence

from paceline.core.units import human_bytes
from paceline.report.bench import Bench
from paceline.report.costs import MOST_BARS, PARTS, step_seconds, wall_parts
from paceline.report.facts import UNKNOWN, number, seconds
from paceline.report.groups import Group
from paceline.report.markup import Markup, Node, element
from paceline.report.sections.results import named
from paceline.report.subject import Subject
from paceline.report.tables import stacked


def cost(subject: Subject) -> list[Node]:
    return [*_time(subject), *_memory(subject), *_step(subject.benches)]


def _time(subject: Subject) -> list[Node]:
    groups = subject.groups
    if not any(any(wall_parts(group)) for group in groups):
        return []
    rows = [
        (named(index, group.label), [*(seconds(part) for part in wall_parts(group)), number(_step_s(group), ".4f")])
        for index, group in enumerate(groups)
    ]
    mean = "" if subject.only else " Means over the finished runs of a group."
    return [
        element("h2", "Where the time went"),
        _chart("wall-time", "Wall time by part; the table below has the values"),
        _as_table(stacked(("Runs", *(part.capitalize() for part in PARTS), "Seconds of a step"), rows)),
        element("p", f"Compilation counts to the free first steps.{mean}{_cut(groups)}", class_="quiet small"),
    ]


def _step_s(group: Group) -> float | None:
    known = [found for run in group.judged if (found := step_seconds(run)) is not None]
    return sum(known) / len(known) if known else None


def _memory(subject: Subject) -> list[Node]:
    """Of one run it stands among the figures."""
    peaks = [[run.card.peak_bytes for run in group.runs if run.card.peak_bytes] for group in subject.groups]
    if subject.only or not any(peaks):
        return []
    rows = [
        (named(index, group.label), [human_bytes(max(peak)) if peak else UNKNOWN, group.runs[0].hardware])
        for index, (group, peak) in enumerate(zip(subject.groups, peaks, strict=True))
    ]
    what = "The largest of a group's runs: allocated on a GPU, on a CPU the resident size of the process."
    return [
        element("h2", "Peak memory"),
        _chart("memory", "Peak memory; the table below has the values"),
        _as_table(stacked(("Runs", "Peak memory", "On"), rows)),
        element("p", what + _cut(subject.groups), class_="quiet small"),
    ]


def _cut(groups: Sequence[Group]) -> str:
    return f" The chart has the first {MOST_BARS} groups, the table all." if len(groups) > MOST_BARS else ""


def _step(benches: Sequence[Bench]) -> list[Node]:
    if not benches:
        return []
    classes = list(dict.fromkeys(name for bench in benches for name in bench.shares))
    headings = ("Step", "On", "Mean step", "Profiled step", "Peak memory", *(_spaced(name) for name in classes))
    rows = [(bench.label, _step_row(bench, classes)) for bench in benches]
    return [
        element("h2", "Where a step goes"),
        _chart("bench", "Seconds of a profiled step by class of work; the table below has the values"),
        stacked(headings, rows),
        element("p", "One profiled step each, from paceline bench step.", class_="quiet small"),
    ]


def _step_row(bench: Bench, classes: Sequence[str]) -> list[Node]:
    parts = [number(bench.shares.get(name, 0.0) * bench.profiled_s, ".4f") + " s" for name in classes]
    mean_s = UNKNOWN if bench.step_s is None else f"{bench.step_s:.4f} s"
    peak = UNKNOWN if bench.peak_gib is None else f"{bench.peak_gib:.2f} GiB"
    return [bench.hardware, mean_s, f"{bench.profiled_s:.4f} s", peak, *parts]


def _spaced(name: str) -> str:
    return name.replace("_", " ").capitalize()


def _chart(name: str, label: str) -> Markup:
    return element("div", element("div", id=name, class_="chart bars", role="img", aria_label=label), class_="panel")


def _as_table(table: Markup) -> Markup:
    return element("details", element("summary", "As a table"), table)
