"""One self-contained page about one run or several: figures, curves, sample, configuration, environment.

It reads cards, configs and metrics, never a checkpoint, so it is quick and works on an unfinished run. plotly.js is
inside the page (4.8 MB) and a content policy forbids every request, so the file can be mailed and kept. Everything
that a run contains is escaped by `element`.
"""

from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from paceline.core.errors import UserError
from paceline.core.files import atomic_write
from paceline.core.units import human_bytes, human_count
from paceline.metrics.card import LOSS_COLUMNS, RunCard
from paceline.report.charts import chart_data
from paceline.report.facts import UNKNOWN, fact, number, seconds, setting, version_line
from paceline.report.markup import Markup, Node, element, join, raw
from paceline.report.runs import Run, load_runs

POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
AXES = {"step": "Steps", "tokens": "Tokens", "train": "Train time", "wall": "Wall time"}


def write_report(run_folders: Sequence[Path], out: Path) -> Path:
    """Write the page about these runs to `out`, whole or not at all, and return its path."""
    page = render(load_runs(run_folders))
    with atomic_write(out, mode="w") as file:
        file.write(page)
    return out


def render(runs: Sequence[Run]) -> str:
    title = " and ".join(run.label for run in runs) if len(runs) < 3 else f"{len(runs)} runs"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", http_equiv="Content-Security-Policy", content=POLICY),
        element("title", f"{title} · paceline"),
        element("style", raw(_asset("report.css"))),
    )
    main = element("main", *_sections(runs, title))
    body = element("body", main, *_scripts(runs))
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"


def _asset(name: str) -> str:
    return (resources.files("paceline.report") / "assets" / name).read_text(encoding="utf-8")


def _plotly_js() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise UserError(
            "the report page needs plotly, which is not installed; pip install 'paceline[report]'"
        ) from None
    return str(get_plotlyjs())


def _scripts(runs: Sequence[Run]) -> list[Markup]:
    return [
        element("script", raw(chart_data(runs)), type="application/json", id="data"),
        element("script", raw(_plotly_js())),
        element("script", raw(_asset("report.js"))),
    ]


def _sections(runs: Sequence[Run], title: str) -> list[Node]:
    one = runs[0] if len(runs) == 1 else None
    return [
        element("header", element("h1", title), *(_about(run, named=one is None) for run in runs)),
        _figures(one) if one else _figures_table(runs),
        *_curves(runs),
        *_samples(runs),
        None if one else _differences(runs),
        element("h2", "Configuration"),
        *(_configuration(run, named=one is None) for run in runs),
        element("h2", "Environment"),
        *(_environment(run, named=one is None) for run in runs),
    ]


def _about(run: Run, *, named: bool) -> Markup:
    card = run.card
    kind = f"preset {card.preset}" + (f", track {card.track}" if card.track else "") + f", seed {card.seed}"
    state = None
    if not card.finished:
        state = element("span", f"Unfinished: {card.steps_done:,} of {card.steps:,} steps. ", class_="unfinished")
    began = card.started[:16].replace("T", " ")
    notes = [element("span", f"Note: {note.rstrip('.')}. ", class_="note") for note in card.notes]
    return element(
        "p", f"{run.label}: " if named else None, kind, f", started {began}. ", state, *notes, class_="quiet"
    )


def figures(run: Run) -> dict[str, tuple[str, str]]:
    """The headline: name to (value, what it means)."""
    card = run.card
    free = run.config.get("train.free_steps", "the free")
    batch = f"{card.steps_done:,} steps, {human_count(card.tokens)} tokens"
    return {
        "Validation loss": (number(card.val_loss, ".4f"), "nats per token"),
        "Bits per byte": (number(card.val_bpb, ".4f"), "comparable between tokenizers"),
        "Train time": (seconds(card.train_s), f"steps only, from step {free} on; no validation, no saving"),
        "Wall time": (seconds(card.wall_s), "everything since launch"),
        "Tokens per second": (number(card.tokens_per_s, ",.0f"), "over the timed steps" + _utilisation(card)),
        "Training": (f"{card.steps_done / max(1, card.steps):.0%}", batch),
        "Parameters": (human_count(card.parameters), f"{card.parameters:,}"),
        "Peak memory": (UNKNOWN if card.peak_bytes is None else human_bytes(card.peak_bytes), _memory_kind(card)),
    }


def _utilisation(card: RunCard) -> str:
    return "" if card.mfu is None else f"; {card.mfu:.1%} of the GPU's bf16 peak"


def _memory_kind(card: RunCard) -> str:
    return "allocated on the GPU" if (card.device or "").startswith("cuda") else "resident, whole process"


def _figures(run: Run) -> Markup:
    cells = [
        element("div", element("dt", name), element("dd", value), element("dd", meaning))
        for name, (value, meaning) in figures(run).items()
    ]
    return element("dl", *cells, class_="figures")


def _figures_table(runs: Sequence[Run]) -> Markup:
    """A row per run; on a phone each row becomes a small block with its own labels."""
    every = [figures(run) for run in runs]
    head = element("tr", element("th", "Run", scope="col"), *(element("th", name, scope="col") for name in every[0]))
    rows = [
        element(
            "tr",
            element("th", _key(index), run.label, scope="row"),
            *(element("td", value, data_label=name) for name, (value, _) in row.items()),
        )
        for index, (run, row) in enumerate(zip(runs, every, strict=True))
    ]
    table = element("table", element("thead", head), element("tbody", *rows), class_="stack")
    clocks = "Train time counts the steps only, after the free first ones; wall time counts everything since launch."
    return join([element("h2", "Results"), table, element("p", clocks, class_="quiet small")])


def _key(index: int) -> Markup:
    """The run's colour in the charts."""
    return element("span", class_="key", style=f"background:var(--run-{index % 6})", aria_hidden="true")


def _curves(runs: Sequence[Run]) -> list[Node]:
    if not any(run.steps or run.evals for run in runs):
        return [element("h2", "Loss"), element("p", "Nothing is recorded yet.", class_="quiet")]
    whole = element("input", type="checkbox", id="whole")
    chart = element(
        "div", id="loss", class_="chart", role="img", aria_label="Loss curves; the table below has the values"
    )
    return [
        element("h2", "Loss"),
        element(
            "div",
            _tabs(),
            element("div", chart, id="loss-panel", role="tabpanel", aria_labelledby="axis-step"),
            element("label", whole, "Show the first steps too", class_="whole"),
            class_="panel",
        ),
        element("noscript", element("p", "The charts need JavaScript; the table has the validation losses.")),
        *(_losses(run, named=len(runs) > 1) for run in runs),
        element("h2", "Schedule and speed, by step"),
        element("div", *_small_charts(runs), class_="row"),
    ]


def _tabs() -> Markup:
    buttons = [
        element(
            "button", text, type="button", role="tab", id=f"axis-{name}", data_axis=name, aria_controls="loss-panel",
            aria_selected=str(name == "step").lower(), tabindex="0" if name == "step" else "-1",
        )
        for name, text in AXES.items()
    ]  # fmt: skip
    return element("div", *buttons, class_="tabs", role="tablist", aria_label="Loss over")


def _small_charts(runs: Sequence[Run]) -> list[Markup]:
    titles = {"window": "Attention window (tokens)", "lr": "Learning-rate multiplier", "rate": "Tokens per second"}
    if not any(record.window_tokens for run in runs for record in run.steps):
        del titles["window"]
    return [
        element("div", element("h3", title), element("div", id=name, class_="chart", role="img", aria_label=title),
                class_="panel")
        for name, title in titles.items()
    ]  # fmt: skip


def _losses(run: Run, *, named: bool) -> Markup | None:
    if not run.card.losses:
        return None
    titles = ("Step", "Validation loss", "Bits per byte", "Train time", "Wall time")
    forms = (",d", ".4f", ".4f", None, None)
    head = element("tr", *(element("th", title, scope="col") for title in titles))
    rows = [
        element("tr", *(element("td", _cell(value, form)) for value, form in zip(row, forms, strict=True)))
        for row in run.card.losses
        if len(row) == len(LOSS_COLUMNS)
    ]
    summary = element("summary", "Validation as a table" + (f": {run.label}" if named else ""))
    return element("details", summary, element("table", element("thead", head), element("tbody", *rows)))


def _cell(value: float | None, form: str | None) -> str:
    return seconds(value) if form is None else number(value, form)


def _samples(runs: Sequence[Run]) -> list[Node]:
    written = [run for run in runs if run.card.sample]
    if not written:
        return []
    blocks: list[Node] = [element("h2", "What the model wrote")]
    for run in written:
        blocks.append(element("h3", run.label) if len(runs) > 1 else None)
        blocks.append(element("div", element("pre", run.card.sample, class_="sample"), class_="panel"))
    return blocks


def _differences(runs: Sequence[Run]) -> Markup:
    """The fields in which the runs' configs differ from each other: what the comparison is about."""
    names = list(dict.fromkeys(name for run in runs for name in run.config))
    differing = [name for name in names if len({setting(run.config.get(name)) for run in runs}) > 1]
    if not differing:
        return join([element("h2", "What differs"), element("p", "Nothing: these runs have one configuration.")])
    head = element("tr", element("th", "Field", scope="col"), *(element("th", run.label, scope="col") for run in runs))
    rows = [
        element(
            "tr",
            element("th", name, scope="row"),
            *(element("td", setting(run.config.get(name)), data_label=run.label) for run in runs),
        )
        for name in differing
    ]
    table = element("table", element("thead", head), element("tbody", *rows), class_="values stack")
    return join([element("h2", "What differs"), table])


def _configuration(run: Run, *, named: bool) -> Markup:
    """What differs from the preset in the open; every value, with those marked, behind one click."""
    changed = {change.field: change.before for change in run.card.diff}
    short = [_value_row(name, run.config.get(name), changed) for name in changed]
    every = [_value_row(name, value, changed) for name, value in run.config.items()]
    what = (
        f"{len(changed)} of {len(every)} values differ from preset {run.card.preset}."
        if changed
        else (f"Every value is that of preset {run.card.preset}.")
    )
    return join(
        [
            element("h3", run.label) if named else None,
            element("p", what, class_="quiet"),
            _values_table(short) if short else None,
            element("details", element("summary", "All values"), _values_table(every)),
        ]
    )


def _values_table(rows: list[Markup]) -> Markup:
    head = element("tr", element("th", "Field", scope="col"), element("th", "Value", scope="col"))
    return element("table", element("thead", head), element("tbody", *rows), class_="values")


def _value_row(name: str, value: Any, changed: dict[str, Any]) -> Markup:
    if name not in changed:
        return element("tr", element("th", name, scope="row"), element("td", setting(value)))
    was = element("span", f"preset: {setting(changed[name])}", class_="was")
    return element("tr", element("th", name, scope="row"), element("td", setting(value), was), class_="changed")


def _environment(run: Run, *, named: bool) -> Markup:
    card = run.card
    facts = dict(fact(name, value) for name, value in card.environment.items())
    facts |= {"code": version_line(card.code_version), "data": card.data_fingerprint}
    facts |= {"launch to first step": seconds(card.startup_s), "free first steps": seconds(card.first_steps_s)}
    rows = [element("tr", element("th", name, scope="row"), element("td", value)) for name, value in facts.items()]
    table = element("table", element("tbody", *rows), class_="values")
    return element("details", element("summary", run.label), table) if named else table
