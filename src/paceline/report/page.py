"""One self-contained page about one run or several: figures, curves, ablation, costs, configuration, environment.

It reads cards, configs and metrics, never a checkpoint, so it is quick and works on an unfinished run. plotly.js
(4.8 MB) lies once in the folder of the runs, for all their pages; one that is to be mailed has it inside. A content
policy forbids every other request. Everything that a run contains is escaped by `element`.
"""

import contextlib
import hashlib
import os
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path

from paceline.core.errors import UserError, optional_module
from paceline.core.files import atomic_write
from paceline.report.charts import as_script, chart_data
from paceline.report.markup import Markup, Node, element, join
from paceline.report.sections.ablation import ablations
from paceline.report.sections.about import about, configuration, environment, warnings
from paceline.report.sections.loss import evaluations, loss, samples, schedule, validations
from paceline.report.sections.results import cost, results, running
from paceline.report.subject import Subject, load_subject

SECTIONS: dict[str, Callable[[Subject], list[Node]]] = {
    "about": about, "warnings": warnings, "running": running, "ablation": ablations, "results": results,
    "curves": loss, "validations": validations, "evaluations": evaluations, "schedule": schedule, "cost": cost,
    "samples": samples, "configuration": configuration, "environment": environment,
}  # fmt: skip
LIVE_ORDER = sorted(SECTIONS, key=["about", "running", "warnings", "results", "curves", *SECTIONS].index)
"""Of the live page: what runs now and its curves come first."""
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
LINKED_POLICY = POLICY.replace("script-src", "script-src 'self' file:")


def write_report(folders: Sequence[Path], out: Path, *, self_contained: bool = False) -> Subject:
    """Write the page about these runs and ablations to `out`, whole or not at all. Returns what it is about."""
    subject = load_subject(folders)
    beside = out.parent
    if beside.resolve() in {folder.resolve() for folder in folders}:  # the pages of all runs share one library
        beside = beside.resolve().parent
    source = None if self_contained else library_in(beside)
    where = None if source is None else Path(os.path.relpath(source, out.parent.resolve())).as_posix()
    policy = POLICY if where is None else LINKED_POLICY
    sections, data = sections_of(subject), as_script(chart_data(subject))
    page = render(subject.title, sections, data, policy=policy, library=where)
    with atomic_write(out, mode="w") as file:
        file.write(page)
    return subject


def library_in(folder: Path) -> Path | None:
    """plotly.js in that folder, put there if it is not; None: nothing can be written there."""
    code = _plotly_js().encode()
    path = folder.resolve() / f"plotly-{hashlib.blake2b(code, digest_size=4).hexdigest()}.js"
    if path.is_file() and path.stat().st_size == len(code):
        return path
    with contextlib.suppress(OSError):
        with atomic_write(path) as file:
            file.write(code)
        return path
    return None


def sections_of(subject: Subject) -> dict[str, Markup]:
    order = SECTIONS if subject.folder is None else LIVE_ORDER
    return {name: join(SECTIONS[name](subject)) for name in order}


def render(
    title: str,
    sections: dict[str, Markup],
    data: str,
    *,
    policy: str = POLICY,
    scripts: str = "",
    library: str | None = None,
) -> str:
    """The whole document. `scripts` run after the one that draws; `library`: where plotly.js lies, None: inside."""
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("title", f"{title} · paceline"),
        element("style", Markup(asset("report.css"))),
    )
    cure = "paceline report --self-contained makes one file with everything in it"
    lacking = f"The charts need {library}, which is not there. The tables have the losses; {cure}."
    missing = None if library is None else element("p", lacking, id="no-charts", class_="unfinished", hidden=True)
    main = element("main", missing, *(element("section", part, id=f"part-{name}") for name, part in sections.items()))
    script = [
        element("script", Markup(data), type="application/json", id="data"),
        element("script", Markup(_plotly_js())) if library is None else element("script", src=library),
        element("script", Markup(asset("report.js") + scripts)),
    ]
    return f"<!doctype html>\n{element('html', head, element('body', main, *script), lang='en')}\n"


def asset(name: str) -> str:
    return (resources.files("paceline.report") / "assets" / name).read_text(encoding="utf-8")


def _plotly_js() -> str:
    cure = "pip install 'paceline[report]'"
    missing = UserError(f"the report page needs plotly, which is not installed; {cure}")
    return str(optional_module("plotly.offline", missing).get_plotlyjs())
