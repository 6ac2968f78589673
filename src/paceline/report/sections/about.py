"""What the page is about and what its reader has to know before believing a number; at its end the configuration, as
the difference that a comparison is about, and the environment."""

from collections.abc import Sequence
from typing import Any

from paceline.analysis.facts import fact, seconds, setting, some, version_line
from paceline.analysis.groups import SAME_EXPERIMENT, experiment
from paceline.report.markup import Markup, Node, details, element, stacked, values_table
from paceline.report.subject import Run, Subject, differing
from paceline.report.summary_text import remarks


def about(subject: Subject) -> list[Node]:
    return [
        element("header", element("h1", subject.title), _about_run(subject.only) if subject.only else None),
        _about_many(subject) if len(subject.runs) > 1 else None,
    ]


def warnings(subject: Subject) -> list[Node]:
    return [
        _listed(subject.left_out, "Left out, because it cannot be read"),
        _listed([*subject.notes, *([] if subject.only else remarks(subject))], "Before reading on"),
        _notes(subject.runs),
    ]


def _about_run(run: Run) -> Markup:
    card = run.card
    word = "Unfinished" if card.ended is None else "Stopped"
    state = element("span", f"{word}: {run.steps_done:,} of {card.steps:,} steps. ", class_="unfinished")
    track = [f"track {card.track}"] if card.track else []
    own = [f"{change.field} {setting(change.after)}" for change in card.diff if change.field not in ("seed", "track")]
    recipe = ", ".join([f"preset {card.preset}", *track, f"seed {card.seed}", *([some(own)] if own else [])])
    began = card.started[:16].replace("T", " ")
    return element("p", f"{recipe}, started {began}. ", None if card.finished else state, class_="quiet")


def _about_many(subject: Subject) -> Markup:
    presets, count = some(list(dict.fromkeys(run.card.preset for run in subject.runs))), len(subject.groups)
    alike = f"{count} groups of like runs" if count > 1 else "one experiment"
    going = f", {len(subject.running)} in progress" if subject.running else ""
    return element("p", f"{len(subject.runs)} runs of {presets}{going}; {alike}.", class_="quiet")


def _notes(runs: Sequence[Run]) -> Markup | None:
    """Each note of a card once, with the runs that have it; open for a single unfinished run: they may say why."""
    notes = list(dict.fromkeys(note for run in runs for note in run.card.notes))
    if not notes:
        return None
    items = []
    for note in notes:
        owners = [run.label for run in runs if note in run.card.notes]
        whose = f"All {len(runs)} runs: " if len(owners) == len(runs) else f"{some(owners)}: "
        items.append(element("li", f"{whose if len(runs) > 1 else ''}{note.rstrip('.')}."))
    title = f"Notes on the card{'s' if len(runs) > 1 else ''} ({len(notes)})"
    return details(title, element("ul", *items), is_open=len(runs) == 1 and not runs[0].card.finished)


def _listed(sentences: Sequence[str], title: str) -> Markup | None:
    if not sentences:
        return None
    items = [element("li", sentence) for sentence in sentences]
    return element("div", element("strong", title), element("ul", *items), class_="mind", role="note")


def configuration(subject: Subject) -> list[Node]:
    if subject.only:
        return [element("h2", "Configuration"), *_settings(subject.only, subject.only.config)]
    names, first = differing(subject.groups), subject.runs[0]
    every = dict.fromkeys(name for run in subject.runs for name in run.config if name not in (*names, "seed"))
    # between runs of one experiment these change nothing of it
    unlike = [name for name in every if len({str(run.config.get(name)) for run in subject.runs}) > 1]
    other_data = {"data.dir"} if "data fingerprint" in names else set()
    apart = {*names, *unlike, *other_data, "seed"}
    shared = {name: value for name, value in first.config.items() if name not in apart}
    unlike = [name for name in unlike if name not in other_data]
    differences = None if unlike else element("p", "Nothing but the seed: these runs have one configuration.")
    if names:
        rows = [(name, [setting(experiment(group.first).get(name)) for group in subject.groups]) for name in names]
        table = stacked(["Field", *(group.label for group in subject.groups)], rows, class_="values")
        differences = element("div", table, class_="scroll", tabindex="0", role="region", aria_label="What differs")
    idle = [name for name in unlike if not name.startswith(SAME_EXPERIMENT)]
    said = ("Different, too, and no other experiment", [name for name in unlike if name not in idle])
    beside = [
        element("p", f"{what}: {some(which)}.") for what, which in (said, ("Different without effect", idle)) if which
    ]
    same = element("h2", "What is the same")
    return [element("h2", "What differs"), differences, *beside, same, *_settings(first, shared)]


def _settings(run: Run, values: dict[str, Any]) -> list[Node]:
    """What differs from the preset in the open; every value, with those marked, behind one click."""
    changed = {change.field: change.before for change in run.card.diff if change.field in values}
    was = {name: element("span", f"preset: {setting(before)}", class_="was") for name, before in changed.items()}
    every = [(name, setting(value), was.get(name)) for name, value in values.items()]
    short, headings = [row for row in every if row[0] in changed], ("Field", "Value")
    if "preset" not in values:  # of several, that of the first says nothing about the others
        return [details("All values", values_table([(name, value, None) for name, value, _ in every], headings))]
    what = f"{len(changed)} of {len(every)} values differ from" if changed else "Every value is that of"
    return [
        element("p", f"{what} preset {run.card.preset}.", class_="quiet"),
        values_table(short, headings) if short else None,
        details("All values", values_table(every, headings)),
    ]


def environment(subject: Subject) -> list[Node]:
    heading = element("h2", "Environment")
    if (run := subject.only) is not None:
        starts = {"launch to first step": run.card.startup_s, "free first steps": run.card.first_steps_s}
        rows = [*_machine(run), *((name, seconds(value), None) for name, value in starts.items())]
        return [heading, values_table(rows)]
    alike: dict[tuple[tuple[str, str, None], ...], list[str]] = {}
    for run in subject.runs:
        alike.setdefault(_machine(run), []).append(run.label)
    return [heading, *(details(some(labels), values_table(machine)) for machine, labels in alike.items())]


def _machine(run: Run) -> tuple[tuple[str, str, None], ...]:
    known = dict(fact(name, value) for name, value in run.card.environment.items())
    known |= {"code": version_line(run.card.code_version), "data": run.card.all_data}
    return tuple((name, value, None) for name, value in known.items())
