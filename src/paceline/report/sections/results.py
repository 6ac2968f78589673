"""Figures of one run; of several a row per group, one per run, and the statistics in words; on the live page what is
trained now; and what it cost: where the wall time went, and memory."""

import statistics
from collections.abc import Mapping, Sequence

from paceline.analysis.facts import UNKNOWN, beside_bits_per_byte, number, seconds, some
from paceline.analysis.groups import Group
from paceline.core.units import human_bytes, human_count
from paceline.report.charts import MOST_BARS, PARTS, wall_parts
from paceline.report.markup import OPEN_ROWS, Markup, Node, chart, details, element, folded, scrolling, stacked
from paceline.report.subject import Run, Subject, mean_time
from paceline.report.summary_text import mean_loss, sentences
from paceline.settings.schedule import tokens_before

PALETTE = 9  # colours of groups in assets/report.css, from --run-0 on
CLOCKS = "Train time counts the steps only, after the free first ones; wall time counts everything since launch."


def results(subject: Subject) -> list[Node]:
    if subject.only:
        cells = [
            element("div", element("dt", name), element("dd", value), element("dd", meaning))
            for name, (value, meaning) in figures(subject.only).items()
        ]
        return [element("dl", *cells, class_="figures")]
    heading = element("h2", "Results")
    if subject.folder is None:
        return [heading, *_tables(subject, subject.runs)]
    finished = [run for run in subject.runs if run.card.finished]
    ended = [run for run in subject.runs if not run.card.finished and run not in subject.running]
    boxes = [
        details(f"{word}: {len(runs)} run{'s' * (len(runs) > 1)}", *_tables(subject, runs), is_open=is_open, id=key)
        for word, key, runs, is_open in (
            ("Finished", "finished", finished, not subject.running),
            ("Stopped or killed", "ended", ended, False),
        )
        if runs
    ]
    return [heading, *boxes] if boxes else []


def _tables(subject: Subject, runs: Sequence[Run]) -> list[Node]:
    """Of these runs: a row for each group and, behind a click, for each of them; and what the groups show, in words."""
    groups = {index: group for index, group in enumerate(subject.groups) if any(run in runs for run in group.members)}
    group_of = {run: index for index, group in groups.items() for run in group.members}
    shown = {run: figures(run) for run in runs}
    rows = [
        [named(group_of[run], run.label), *(value for value, _ in shown[run].values()), str(run.card.seed)]
        for run in runs
    ]
    every = scrolling(("Run", *shown[runs[0]], "Seed"), rows, label=f"{len(runs)} runs", named=True)
    counted = any(group.runs for group in groups.values())
    behind = details(f"All {len(runs)} runs", every)
    if counted and len(groups) < len(runs):
        tables: list[Node] = [_groups_table(groups), behind]
    else:
        tables = [behind if len(runs) > OPEN_ROWS and subject.folder is None else every]
    words = [element("p", sentence) for sentence in sentences(list(groups.values()))] if counted else []
    lines = [element("h3", "In words"), *folded(f"All {len(words)} sentences", words)] if words else []
    return [*tables, element("p", CLOCKS, class_="quiet small"), *lines]


def figures(run: Run) -> dict[str, tuple[str, str]]:
    """The headline: name to (value, what it means)."""
    card = run.card
    free = run.config.get("train.untimed_steps", "the free")
    tokens = max([card.tokens, *run.curves.steps["tokens"][-1:]])
    beside = beside_bits_per_byte(card) if card.finished else ""
    batch = f"{run.steps_done:,} steps, {human_count(tokens)} tokens"
    used = "" if card.mfu is None or not run.is_timed else f"; {card.mfu:.1%} of the GPU's bf16 peak"
    memory = "allocated on the GPU" if (card.device or "").startswith("cuda") else "resident, whole process"
    return {
        "Validation loss": _validated(run, card.val_loss, "nats per token"),
        "Bits per byte": _validated(run, card.val_bpb, "comparable between tokenizers" + (beside and f"; {beside}")),
        "Train time": (seconds(run.train_s), f"steps only, from step {free} on; no validation, no saving"),
        "Wall time": (seconds(run.wall_s), "everything since launch"),
        "Tokens per second": (number(_rate(run), ",.0f"), f"over the timed steps{used}"),
        "Training": (f"{run.steps_done / max(1, card.steps):.0%}", batch),
        "Parameters": (human_count(card.parameters), f"{card.parameters:,}"),
        "Peak memory": (UNKNOWN if card.peak_bytes is None else human_bytes(card.peak_bytes), memory),
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


def _groups_table(groups: Mapping[int, Group[Run]]) -> Markup:
    """`groups` by their number on the page, which is that of their colour."""
    headings = (
        "Group", "Validation loss", "Bits per byte", "95 % interval", "Runs", "Train time", "Wall time",
        "Tokens per second",
    )  # fmt: skip

    def row(index: int, group: Group[Run]) -> list[Node]:
        counted, every = len(group.runs), len(group.members)
        all_of = f"{counted}" if counted == every else f"{counted} of {every}"
        loss, mean = group.mean if counted else None, mean_loss(group)
        between = UNKNOWN if mean is None else f"{mean.low:.4f} to {mean.high:.4f}"
        interval = "one seed only" if counted == 1 else between
        times = mean_time(group, lambda run: run.train_s), mean_time(group, lambda run: run.wall_s)
        bytewise = [run.card.val_bpb for run in group.runs]
        known = [value for value in bytewise if value is not None]
        bits = statistics.fmean(known) if known and len(known) == counted else None
        cells = [number(loss, ".4f"), number(bits, ".4f"), interval, all_of, *map(seconds, times)]
        return [named(index, group.label), *cells, number(mean_time(group, _rate), ",.0f")]

    rows = [row(index, group) for index, group in groups.items()]
    return scrolling(headings, rows, label=f"{len(rows)} groups", named=True)


def named(index: int, label: str) -> Markup:
    style = f"background:var(--run-{index % PALETTE})"
    return element("span", element("span", class_="key", style=style, aria_hidden="true"), label)


def running(subject: Subject) -> list[Node]:
    """How far each run in progress is, how fast, and when it will be done."""
    if not subject.running:
        return []
    group_of = {run: number for number, group in enumerate(subject.groups) for run in group.members}
    cards = []
    for run in subject.running:
        share = f"{100 * run.steps_done // max(1, run.card.steps)}"
        bar = element("span", style=f"width:{share}%;background:var(--run-{group_of[run] % PALETTE})")
        role = {"role": "progressbar", "aria_valuenow": share, "aria_valuemin": "0", "aria_valuemax": "100"}
        cells = [element("div", element("dt", name), element("dd", value)) for name, value in _progress(run).items()]
        heading = element("h3", named(group_of[run], run.label), element("span", f"{share} %", class_="share"))
        progress = element("div", bar, class_="bar", aria_label=f"Progress of {run.label}", **role)
        cards.append(element("article", heading, progress, element("dl", *cells), class_="panel"))
    return [element("h2", "In progress"), element("div", *cards, class_="going")]


def _progress(run: Run) -> dict[str, str]:
    smooth, rates = run.smooth_loss[-1:].tolist(), run.curves.steps["tokens_per_s"][-1:].tolist()
    rate, left_s = next((rate for rate in rates if rate > 0), None), None
    if rate is not None and run.settings is not None:
        done, end = (tokens_before(run.settings, step) for step in (run.steps_done, run.card.steps))
        left_s = (end - done) / rate
    return {
        "Time left": seconds(left_s),
        "Tokens per second": number(rate, ",.0f"),
        "Step": f"{run.steps_done:,} of {run.card.steps:,}",
        "Training loss": next((f"{loss:.4f}" for loss in smooth if loss == loss), UNKNOWN),
        "Validation loss": figures(run)["Validation loss"][0],
    }


def cost(subject: Subject) -> list[Node]:
    return [*_time(subject), *_memory(subject)]


def _time(subject: Subject) -> list[Node]:
    groups = subject.groups
    if not any(any(wall_parts(group)) for group in groups):
        return []
    rows = [
        (named(index, group.label), [*map(seconds, wall_parts(group)), number(mean_time(group, _step_seconds), ".4f")])
        for index, group in enumerate(groups)
    ]
    mean = "" if subject.only else " Means over the finished runs of a group, where hardware and code are equal."
    return [
        element("h2", "Where the time went"),
        chart("wall-time", "Wall time by part; the table below has the values", "chart bars"),
        details("As a table", stacked(("Runs", *(part.capitalize() for part in PARTS), "Seconds of a step"), rows)),
        element("p", f"Compilation counts to the free first steps.{mean}{_cut(groups)}", class_="quiet small"),
    ]


def _memory(subject: Subject) -> list[Node]:
    """Of one run it stands among the figures."""
    peaks = [[run.card.peak_bytes for run in group.members if run.card.peak_bytes] for group in subject.groups]
    if subject.only or not any(peaks):
        return []
    hardware = [some(sorted({run.hardware for run in group.members})) for group in subject.groups]
    rows = [
        (named(index, group.label), [human_bytes(max(peak)) if peak else UNKNOWN, on])
        for index, (group, peak, on) in enumerate(zip(subject.groups, peaks, hardware, strict=True))
    ]
    what = "The largest of a group's runs: allocated on a GPU, on a CPU the resident size of the process."
    return [
        element("h2", "Peak memory"),
        chart("memory", "Peak memory; the table below has the values", "chart bars"),
        details("As a table", stacked(("Runs", "Peak memory", "On"), rows)),
        element("p", what + _cut(subject.groups), class_="quiet small"),
    ]


def _cut(groups: Sequence[Group[Run]]) -> str:
    return f" The chart has the first {MOST_BARS} groups, the table all." if len(groups) > MOST_BARS else ""


def _step_seconds(run: Run) -> float | None:
    card = run.card
    if not run.is_timed or not card.tokens_per_s or not card.steps_done or card.rewinds or card.restarts:
        return None
    return card.tokens / card.steps_done / card.tokens_per_s
