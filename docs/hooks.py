"""What MkDocs asks of this project: the menu of techniques, tables that a phone can show, and a place in the site for
files outside docs/.

Pages link to code, tests and results by relative paths, which work in a checkout and wherever it is shown. No address
of the repository is named anywhere, so the site carries every file that is linked to, as a page under source/, and the
links lead there. Folders become lists of their files. Search leaves these pages out.
"""

import itertools
import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from paceline.lab.technique import techniques

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?<=\]\()(?:\.\./)+[^)#]+")
"""The target of a link that climbs out of its folder."""
TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
HEADING = re.compile(r"<th\b[^>]*>(.*?)</th>", re.DOTALL)
CELL = re.compile(r"<td\b")
TAG = re.compile(r"<[^>]*>")
LANGUAGES = {".py": "python", ".json": "json", ".yaml": "yaml"}


def on_config(config: MkDocsConfig) -> None:
    """Fill in the techniques by topic."""
    topics: dict[str, list[dict[str, str]]] = {}
    for one in techniques().values():
        topics.setdefault(one.topic, []).append({one.title: f"techniques/{one.key}.md"})
    pages = ["techniques/index.md", *({topic: group} for topic, group in topics.items())]
    config.nav = [{"Techniques": pages} if "Techniques" in entry else entry for entry in config.nav or []]


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add a page for every file and folder of the repository that a page links to. MkDocs warns of one that is missing,
    since its link then leads to no page."""
    linked = {path for page in files.documentation_pages() for path in _outside(page) if (ROOT / path).exists()}
    below = {file for path in linked for file in _files_in(path)}
    for path in sorted(linked | below):
        files.append(File.generated(config, _page_of(path), content=_shown(path)))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    if page.file.src_uri == "README.md":  # the home page has the map of all pages itself
        page.meta["hide"] = ["navigation", "toc"]
    return LINK.sub(lambda link: _in_site(page.file.src_uri, link.group()), markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    return TABLE.sub(lambda table: _labelled(table.group()), html)


def _labelled(table: str) -> str:
    """Cells with the name of their column, which on a phone stands before them, a row being a block there (site.css).
    Of two columns the second needs no label."""
    names = [TAG.sub("", name).replace('"', "&quot;") for name in HEADING.findall(table)]
    labels = itertools.cycle(names if len(names) > 2 else [""])
    return CELL.sub(lambda cell: f'{cell.group()} data-label="{next(labels)}"', table)


def _outside(page: File) -> Iterator[str]:
    """Paths from the root of the repository that `page` links to and that are not in docs/."""
    for target in LINK.findall(page.content_string):
        if not (path := _from_root(page.src_uri, target)).startswith("docs/"):
            yield path


def _from_root(page: str, target: str) -> str:
    return posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), target))


def _in_site(page: str, target: str) -> str:
    """The link's target as it is in the site; that of a link which stays inside docs/ is unchanged."""
    if (path := _from_root(page, target)).startswith("docs/"):
        return target
    return posixpath.relpath(_page_of(path), posixpath.dirname(page))


def _page_of(path: str) -> str:
    return f"source/{path}.md"


def _files_in(path: str) -> list[str]:
    """The JSON files under a folder, which is what results and records of runs are; of a file, none."""
    return sorted(file.relative_to(ROOT).as_posix() for file in (ROOT / path).rglob("*.json"))


def _shown(path: str) -> str:
    """A page with the text of a file, or with links to a folder's files."""
    facts = f"---\ntitle: {path}\nsearch:\n  exclude: true\n---\n\n"
    head = f"{facts}# `{path}`\n\n"
    if (ROOT / path).is_dir():
        page = posixpath.dirname(_page_of(path))
        return head + "\n".join(f"- [`{name}`]({posixpath.relpath(_page_of(name), page)})" for name in _files_in(path))
    text = (ROOT / path).read_text(encoding="utf-8")
    if path.endswith(".ipynb"):
        return facts + "\n\n".join(_cell(path, cell) for cell in json.loads(text)["cells"])
    return f"{head}~~~~~~{LANGUAGES.get(Path(path).suffix, 'text')}\n{text.rstrip()}\n~~~~~~\n"


def _cell(path: str, cell: dict[str, Any]) -> str:
    """One cell of a notebook: text as it is, code and what it printed as code. Its links are as in a page of docs/ that
    lies beside the notebook's folder."""
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return LINK.sub(lambda link: _from_notebook(path, link.group()), source)
    printed = ["".join(output["text"]) for output in cell["outputs"] if output["output_type"] == "stream"]
    return "\n\n".join(
        [f"~~~~~~python\n{source}\n~~~~~~", *(f"~~~~~~text\n{text.rstrip()}\n~~~~~~" for text in printed)]
    )


def _from_notebook(path: str, target: str) -> str:
    """The target of a notebook's link, seen from its page under source/."""
    linked = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
    at = linked.removeprefix("docs/") if linked.startswith("docs/") else _page_of(linked)
    return posixpath.relpath(at, posixpath.dirname(_page_of(path)))
