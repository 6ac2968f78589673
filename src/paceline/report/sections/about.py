"""The top of the page: what it is about, and what its reader has to know before believing a number."""

from collections.abc import Sequence

from paceline.report.markup import Markup, Node, element
from paceline.report.recipe import recipe
from paceline.report.runs import Run
from paceline.report.subject import Subject
from paceline.report.words import remarks, some


def about(subject: Subject, title: str) -> list[Node]:
    return [
        element("header", element("h1", title), *(_about_run(run) for run in subject.runs if subject.only)),
        element("p", _about_many(subject), class_="quiet") if len(subject.runs) > 1 else None,
        _listed(subject.left_out, "Left out, because it cannot be read"),
        _listed([*subject.notes, *([] if subject.only else remarks(subject))], "Before reading on"),
        _notes(subject.runs),
    ]


def _about_run(run: Run) -> Markup:
    card = run.card
    state = None
    if not card.finished:
        word = "Unfinished" if card.ended is None else "Stopped"
        state = element("span", f"{word}: {run.steps_done:,} of {card.steps:,} steps. ", class_="unfinished")
    began = card.started[:16].replace("T", " ")
    return element("p", f"{recipe(card)}, started {began}. ", state, class_="quiet")


def _about_many(subject: Subject) -> str:
    runs, groups = subject.runs, subject.groups
    presets = some(list(dict.fromkeys(run.card.preset for run in runs)))
    alike = f"{len(groups)} groups of like runs" if len(groups) > 1 else "all alike but for the seed"
    return f"{len(runs)} runs of {presets}; {alike}."


def _notes(runs: Sequence[Run]) -> Markup | None:
    """Each note of a card once, with who has it. Most say what a machine chose, so they are folded, unless a single
    run is unfinished and they may say why."""
    notes = list(dict.fromkeys(note for run in runs for note in run.card.notes))
    if not notes:
        return None
    items = [element("li", f"{_owners(runs, note)}{note.rstrip('.')}.") for note in notes]
    title = f"Notes on the card{'s' if len(runs) > 1 else ''} ({len(notes)})"
    unfinished = len(runs) == 1 and not runs[0].card.finished
    return element("details", element("summary", title), element("ul", *items), open=unfinished)


def _owners(runs: Sequence[Run], note: str) -> str:
    if len(runs) == 1:
        return ""
    owners = [run.label for run in runs if note in run.card.notes]
    return f"All {len(runs)} runs: " if len(owners) == len(runs) else f"{some(owners)}: "


def _listed(sentences: Sequence[str], title: str) -> Markup | None:
    if not sentences:
        return None
    items = [element("li", sentence) for sentence in sentences]
    return element("div", element("strong", title), element("ul", *items), class_="mind", role="note")
