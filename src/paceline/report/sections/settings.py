"""The configuration, as the difference that a comparison is about, and the environment."""

from collections.abc import Sequence
from typing import Any

from paceline.report.facts import fact, seconds, setting, version_line
from paceline.report.groups import Group, compared_settings
from paceline.report.markup import Markup, Node, element
from paceline.report.runs import Run
from paceline.report.subject import Subject
from paceline.report.tables import facts, stacked
from paceline.report.words import some


def configuration(subject: Subject) -> list[Node]:
    if subject.only:
        return [element("h2", "Configuration"), *_of_run(subject.only, subject.only.config)]
    groups = subject.groups
    differing = _differing(groups)
    shared = {name: value for name, value in subject.runs[0].config.items() if name not in {*differing, "seed"}}
    return [
        element("h2", "What differs"),
        _differences(groups, differing),
        element("h2", "What is the same"),
        *_of_run(subject.runs[0], shared),
    ]


def _differing(groups: Sequence[Group]) -> list[str]:
    settings = [compared_settings(group.runs[0]) for group in groups]
    names = dict.fromkeys(name for one in settings for name in one)
    return [name for name in names if len({one.get(name) for one in settings}) > 1]


def _differences(groups: Sequence[Group], names: Sequence[str]) -> Markup:
    if not names:
        return element("p", "Nothing but the seed: these runs have one configuration.")
    rows = [(name, [setting(group.runs[0].config.get(name)) for group in groups]) for name in names]
    table = stacked(["Field", *(group.label for group in groups)], rows, class_="values")
    return element("div", table, class_="scroll", tabindex="0", role="region", aria_label="What differs")


def _of_run(run: Run, values: dict[str, Any]) -> list[Node]:
    """What differs from the preset in the open; every value, with those marked, behind one click."""
    changed = {change.field: change.before for change in run.card.diff if change.field in values}
    short = [_value_row(name, values.get(name), changed) for name in changed]
    every = [_value_row(name, value, changed) for name, value in values.items()]
    what = (
        f"{len(changed)} of {len(every)} values differ from preset {run.card.preset}."
        if changed
        else f"Every value is that of preset {run.card.preset}."
    )
    return [
        element("p", what, class_="quiet"),
        _values_table(short) if short else None,
        element("details", element("summary", "All values"), _values_table(every)),
    ]


def _values_table(rows: list[Markup]) -> Markup:
    head = element("tr", element("th", "Field", scope="col"), element("th", "Value", scope="col"))
    return element("table", element("thead", head), element("tbody", *rows), class_="values")


def _value_row(name: str, value: Any, changed: dict[str, Any]) -> Markup:
    if name not in changed:
        return element("tr", element("th", name, scope="row"), element("td", setting(value)))
    was = element("span", f"preset: {setting(changed[name])}", class_="was")
    return element("tr", element("th", name, scope="row"), element("td", setting(value), was), class_="changed")


def environment(subject: Subject) -> list[Node]:
    if subject.only:
        run = subject.only
        starts = {"launch to first step": run.card.startup_s, "free first steps": run.card.first_steps_s}
        return [element("h2", "Environment"), facts([*_machine(run), *((n, seconds(s)) for n, s in starts.items())])]
    alike: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for run in subject.runs:
        alike.setdefault(tuple(_machine(run)), []).append(run.label)
    tables = [element("details", element("summary", some(labels)), facts(machine)) for machine, labels in alike.items()]
    return [element("h2", "Environment"), *tables]


def _machine(run: Run) -> list[tuple[str, str]]:
    card = run.card
    known = dict(fact(name, value) for name, value in card.environment.items())
    return list((known | {"code": version_line(card.code_version), "data": card.data_fingerprint}).items())
