"""One self-contained page about one run or several: figures, curves, ablation, costs, configuration, environment.

It reads cards, configs and metrics, never a checkpoint, so it is quick and works on an unfinished run. plotly.js is
inside the page (4.8 MB) and a content policy forbids every request, so the file can be mailed and kept. Everything
that a run contains is escaped by `element`. The page consists of sections, which the live page exchanges one by one.
"""

from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path

from paceline.core.errors import UserError
from paceline.core.files import atomic_write
from paceline.report.charts import as_script, chart_data
from paceline.report.markup import Markup, Node, element, join
from paceline.report.sections.ablation import ablations
from paceline.report.sections.about import about, configuration, environment
from paceline.report.sections.loss import evaluations, loss, samples, schedule, validations
from paceline.report.sections.results import cost, results, running
from paceline.report.subject import Subject, load_subject

SECTIONS: dict[str, Callable[[Subject], list[Node]]] = {
    "about": about,
    "running": running,
    "ablation": ablations,
    "results": results,
    "curves": loss,
    "validations": validations,
    "evaluations": evaluations,
    "schedule": schedule,
    "cost": cost,
    "samples": samples,
    "configuration": configuration,
    "environment": environment,
}
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


def write_report(folders: Sequence[Path], out: Path) -> Subject:
    """Write the page about these runs and ablations to `out`, whole or not at all. Returns what it is about."""
    subject = load_subject(folders)
    page = render(subject.title, sections_of(subject), as_script(chart_data(subject)))
    with atomic_write(out, mode="w") as file:
        file.write(page)
    return subject


def sections_of(subject: Subject) -> dict[str, Markup]:
    return {name: join(section(subject)) for name, section in SECTIONS.items()}


def render(title: str, sections: dict[str, Markup], data: str, *, policy: str = POLICY, scripts: str = "") -> str:
    """The whole document. `scripts` are our own, run after the one that draws."""
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("title", f"{title} · paceline"),
        element("style", Markup(asset("report.css"))),
    )
    main = element("main", *(element("section", part, id=f"part-{name}") for name, part in sections.items()))
    script = [
        element("script", Markup(data), type="application/json", id="data"),
        element("script", Markup(_plotly_js())),
        element("script", Markup(asset("report.js") + scripts)),
    ]
    return f"<!doctype html>\n{element('html', head, element('body', main, *script), lang='en')}\n"


def asset(name: str) -> str:
    return (resources.files("paceline.report") / "assets" / name).read_text(encoding="utf-8")


def _plotly_js() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        cure = "pip install 'paceline[report]'"
        raise UserError(f"the report page needs plotly, which is not installed; {cure}") from None
    return str(get_plotlyjs())
