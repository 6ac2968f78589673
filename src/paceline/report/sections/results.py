"""Figures of one run; of several a row per group, one per run, and the statistics in words."""

import statistics as plain
from collections.abc import Callable, Sequence

from paceline.core.units import human_bytes, human_count
from paceline.metrics.card import RunCard
from paceline.report.facts import UNKNOWN, beside_bits_per_byte, number, seconds
from paceline.report.groups import Group
from paceline.report.markup import Markup, Node, element
from paceline.report.runs import Run
from paceline.report.subject import Subject
from paceline.report.tables import OPEN_ROWS, folded, stacked
from paceline.report.words import Statistics, mean_loss, sentences

PALETTE = 9
"""Colours of groups in assets/report.css, from --run-0 on."""
CLOCKS = "Train time counts the steps only, after the free first ones; wall time counts everything since launch."


def results(subject: Subject, statistics: Statistics | None) -> list[Node]:
    if subject.only:
        return [_figures(subject.only)]
    every = _runs_table(subject)
    behind = element("details", element("summary", f"All {len(subject.runs)} runs"), every)
    if len(subject.groups) < len(subject.runs):
        tables: list[Node] = [_groups_table(subject.groups, statistics), behind]
    else:
        tables = [behind if len(subject.runs) > OPEN_ROWS else every]
    return [element("h2", "Results"), *tables, element("p", CLOCKS, class_="quiet small"), *_words(subject, statistics)]


def figures(run: Run) -> dict[str, tuple[str, str]]:
    """The headline: name to (value, what it means)."""
    card = run.card
    free = run.config.get("train.free_steps", "the free")
    tokens = max([card.tokens, *run.curves.steps["tokens"][-1:]])
    beside = beside_bits_per_byte(card) if card.finished else ""
    batch = f"{run.steps_done:,} steps, {human_count(tokens)} tokens"
    return {
        "Validation loss": _validated(run, card.val_loss, "nats per token"),
        "Bits per byte": _validated(run, card.val_bpb, "comparable between tokenizers" + (beside and f"; {beside}")),
        "Train time": (seconds(run.train_s), f"steps only, from step {free} on; no validation, no saving"),
        "Wall time": (seconds(run.wall_s), "everything since launch"),
        "Tokens per second": (number(_rate(run), ",.0f"), "over the timed steps" + _utilisation(run)),
        "Training": (f"{run.steps_done / max(1, card.steps):.0%}", batch),
        "Parameters": (human_count(card.parameters), f"{card.parameters:,}"),
        "Peak memory": (UNKNOWN if card.peak_bytes is None else human_bytes(card.peak_bytes), _memory_kind(card)),
    }


def _validated(run: Run, value: float | None, meaning: str) -> tuple[str, str]:
    """The newest validation is the headline if no step followed it, or with its step; never that of step 0."""
    at = run.card.validated_at
    if value is None or at is None or at == run.steps_done:
        return number(value, ".4f"), meaning
    if at == 0:
        return UNKNOWN, f"validated at step 0 only: {value:.4f}"
    return number(value, ".4f"), f"last validated at step {at:,.0f}; {meaning}"


def _rate(run: Run) -> float | None:
    """Of the whole run where the card has it, else the newest."""
    newest = run.curves.steps["tokens_per_s"][-1:].tolist()
    known = [rate for rate in [run.card.tokens_per_s, *newest] if rate is not None and rate == rate]
    return known[0] if known and run.is_timed else None


def _utilisation(run: Run) -> str:
    mfu = run.card.mfu if run.is_timed else None
    return "" if mfu is None else f"; {mfu:.1%} of the GPU's bf16 peak"


def _memory_kind(card: RunCard) -> str:
    return "allocated on the GPU" if (card.device or "").startswith("cuda") else "resident, whole process"


def _figures(run: Run) -> Markup:
    cells = [
        element("div", element("dt", name), element("dd", value), element("dd", meaning))
        for name, (value, meaning) in figures(run).items()
    ]
    return element("dl", *cells, class_="figures")


def _groups_table(groups: Sequence[Group], statistics: Statistics | None) -> Markup:
    """Means of the judged runs."""
    headings = ("Group", "Runs", "Validation loss", "95 % interval", "Train time", "Wall time", "Tokens per second")

    def mean(group: Group, value: Callable[[Run], float | None]) -> float | None:
        known = [found for run in group.judged if (found := value(run)) is not None]
        return plain.fmean(known) if known else None

    def row(index: int, group: Group) -> tuple[Node, list[Node]]:
        counted = len(group.losses)
        all_of = f"{counted}" if counted == len(group.runs) else f"{counted} of {len(group.runs)}"
        loss = plain.fmean(group.losses) if group.losses else None
        times = (mean(group, lambda run: run.train_s), mean(group, lambda run: run.wall_s))
        cells = [all_of, number(loss, ".4f"), _interval(group, statistics), *map(seconds, times)]
        return named(index, group.label), [*cells, number(mean(group, _rate), ",.0f")]

    return stacked(headings, [row(index, group) for index, group in enumerate(groups)])


def _interval(group: Group, statistics: Statistics | None) -> str:
    if len(group.losses) == 1:
        return "one seed only"
    estimate = mean_loss(group, statistics) if statistics else None
    return UNKNOWN if estimate is None else f"{estimate.low:.4f} to {estimate.high:.4f}"


def _runs_table(subject: Subject) -> Markup:
    """A row per run; on a phone each row becomes a small block with its own labels."""
    group_of = {id(run): number for number, group in enumerate(subject.groups) for run in group.runs}
    every = [(run, figures(run)) for run in subject.runs]
    rows = [
        (named(group_of[id(run)], run.label), [str(run.card.seed), *(value for value, _ in row.values())])
        for run, row in every
    ]
    return stacked(("Run", "Seed", *every[0][1]), rows)


def named(index: int, label: str) -> Markup:
    """A group's colour in the charts, and its name."""
    style = f"background:var(--run-{index % PALETTE})"
    return element("span", element("span", class_="key", style=style, aria_hidden="true"), label)


def _words(subject: Subject, statistics: Statistics | None) -> list[Node]:
    said = sentences(subject.groups, statistics) if statistics else []
    lines = folded(f"All {len(said)} sentences", [element("p", sentence) for sentence in said])
    return [element("h3", "In words"), *lines] if said else []
