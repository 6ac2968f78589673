"""One self-contained page about one run or several: figures, curves, ablation, costs, configuration, environment.

It reads cards, configs and metrics, never a checkpoint, so it is quick and works on an unfinished run. plotly.js is
inside the page (4.8 MB) and a content policy forbids every request, so the file can be mailed and kept. Everything
that a run contains is escaped by `element`. The page consists of sections, which the live page exchanges one by one.
"""

from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from paceline.core.errors import UserError
from paceline.core.files import atomic_write
from paceline.report.bench import read_bench
from paceline.report.charts import as_script, chart_data
from paceline.report.markup import Markup, element, join, raw
from paceline.report.sections.ablation import ablations
from paceline.report.sections.about import about
from paceline.report.sections.cost import cost
from paceline.report.sections.evaluations import evaluations
from paceline.report.sections.loss import loss, samples, schedule, validations
from paceline.report.sections.results import results
from paceline.report.sections.running import running
from paceline.report.sections.settings import configuration, environment
from paceline.report.subject import Subject, load_subject
from paceline.report.words import Statistics

PARTS = (
    "about", "running", "ablation", "results", "curves", "validations", "evaluations", "schedule", "cost", "samples",
    "configuration", "environment",
)  # fmt: skip
"""Names of the sections, in their order."""
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


def write_report(
    folders: Sequence[Path], out: Path, *, benches: Sequence[Path] = (), statistics: Statistics | None = None
) -> Subject:
    """Write the page about these runs and ablations to `out`, whole or not at all. Returns what it is about."""
    subject = load_subject(folders, [read_bench(path) for path in benches])
    page = render(subject.title, sections_of(subject, statistics), as_script(chart_data(subject)))
    with atomic_write(out, mode="w") as file:
        file.write(page)
    return subject


def sections_of(subject: Subject, statistics: Statistics | None, title: str | None = None) -> dict[str, Markup]:
    """The parts of the page by name."""
    contents = (
        about(subject, title or subject.title),
        running(subject),
        ablations(subject.ablations),
        results(subject, statistics),
        loss(subject),
        validations(subject),
        evaluations(subject),
        schedule(subject),
        cost(subject),
        samples(subject.runs),
        configuration(subject),
        environment(subject),
    )
    return {name: join(nodes) for name, nodes in zip(PARTS, contents, strict=True)}


def render(title: str, sections: dict[str, Markup], data: str, *, policy: str = POLICY, scripts: str = "") -> str:
    """The whole document. `scripts` are our own, run after the one that draws."""
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("title", f"{title} · paceline"),
        element("style", raw(asset("report.css"))),
    )
    main = element("main", *(element("section", part, id=f"part-{name}") for name, part in sections.items()))
    script = [
        element("script", raw(data), type="application/json", id="data"),
        element("script", raw(_plotly_js())),
        element("script", raw(asset("report.js") + scripts)),
    ]
    return f"<!doctype html>\n{element('html', head, element('body', main, *script), lang='en')}\n"


def asset(name: str) -> str:
    return (resources.files("paceline.report") / "assets" / name).read_text(encoding="utf-8")


def _plotly_js() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise UserError(
            "the report page needs plotly, which is not installed; pip install 'paceline[report]'"
        ) from None
    return str(get_plotlyjs())
