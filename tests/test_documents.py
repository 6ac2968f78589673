"""Every command shown in README and docs exists, with flags that parse, also behind torchrun."""

import re
import shlex
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import VERBS
from paceline.commands import ablate, bench, plan, train
from paceline.core.command_line import parse
from paceline.recipes.presets import preset
from reference_pages import arguments_of

ROOT = Path(__file__).parents[1]
SITE = ROOT / "mkdocs.yml"
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
ON_PRESET = {
    "bench step": bench.StepArgs,
    "bench gemm": bench.GemmArgs,
    "plan": plan.PlanArgs,
    "schedule": train.TrainArgs,
    "ablate": ablate.AblateArgs,
}
FENCED = re.compile(r"^```[a-z]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`((?:paceline|make|torchrun) [^`\n]+)`")
TORCHRUN = re.compile(r"torchrun (?:--[a-z-]+ \S+ )*-m paceline\.cli ")


GENERATED = sorted(path for room in ("techniques", "reference") for path in (ROOT / "docs" / room).glob("*.md"))
"""tests/tools parses the command of each technique and compares the config that it gives."""


def commands(documents: Iterable[Path]) -> set[str]:
    """Lines of code blocks and inline code that start a program of ours, without comments and launcher."""
    texts = [path.read_text() for path in documents]
    lines = [line.removeprefix("$ ") for text in texts for block in FENCED.findall(text) for line in block.splitlines()]
    found = [line for line in lines if line.startswith(("paceline ", "make ", "torchrun "))]
    found += [command for text in texts for command in INLINE.findall(FENCED.sub("", text))]
    return {TORCHRUN.sub("paceline ", command).split(" #")[0].strip() for command in found}


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def sampled() -> list[Any]:
    """Every command of a page that people write, and of the generated ones every tenth; the others are slow."""
    written = sorted(commands(path for path in DOCUMENTS if path not in GENERATED))
    generated = sorted(commands(GENERATED) - set(written))
    return written + [pytest.param(c, marks=pytest.mark.slow if n % 10 else ()) for n, c in enumerate(generated)]


def shown_file(name: str) -> str:
    """A file that a page of docs/ shows as new."""
    shown = re.compile(rf"^`{re.escape(name)}`, new:\n\n```py\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    return next(found[1] for page in (ROOT / "docs").glob("*.md") if (found := shown.search(page.read_text())))


@pytest.mark.parametrize("command", sampled())
def test_a_documented_command_parses(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, *words = shlex.split(command)
    for name in (word for before, word in pairwise(words) if before == "--plugin" and word.endswith(".py")):
        monkeypatch.chdir(tmp_path)
        (tmp_path / name).write_text(shown_file(name))
    if program == "make":
        assert set(words) <= make_targets()
        return
    verb = " ".join(words[:2]) if " ".join(words[:2]) in VERBS else words[0]
    assert verb in VERBS, f"{command}: no such verb"
    rest = words[len(verb.split()) :]
    if any(word.isupper() or "…" in word for word in rest):
        return  # a pattern such as `paceline sample RUN`, not a command to type
    if verb == "train":
        base = preset("demo") if "--resume" in rest else train.base_config(rest)  # there is no run to resume here
        train.parse_arguments(rest, base)
    elif verb in ON_PRESET:
        train.parse_on_preset(ON_PRESET[verb], rest, train.base_config(rest), verb=verb, description="")
    elif rest != ["--help"]:
        parse(arguments_of(verb)[0], rest, verb=verb, description="")


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_to_files_and_headings_and_rows_of_tables_are_whole(page: Path) -> None:
    text = FENCED.sub("", page.read_text())
    for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", text):
        at = page.parent / target if target else page
        assert target.startswith("https://") or at.exists(), f"{page.name}: {target}"
        assert not anchor or target.startswith("https://") or anchor in anchors(at), f"{page.name}: {target}#{anchor}"
    for rows in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        assert len({len(re.split(r"(?<!\\)\|", row)) for row in rows.splitlines()}) == 1, rows


def anchors(page: Path) -> set[str]:
    """What GitHub and MkDocs make of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_page_is_reached_from_the_map() -> None:
    docs = ROOT / "docs"
    pages = [path.relative_to(docs).as_posix() for path in (*docs.glob("*.md"), *(docs / "reference").glob("*.md"))]
    assert [page for page in pages if f"({page})" not in (docs / "README.md").read_text()] == ["README.md"]
    assert "(docs/README.md)" in (ROOT / "README.md").read_text()


def test_the_map_calls_pages_as_the_menu_of_the_site_does() -> None:
    menu = {page: title for title, page in re.findall(r"- ([^:\n]+): (\S+\.md)$", SITE.read_text(), re.MULTILINE)}
    rows = re.findall(r"^\| \[([^]]+)\]\(([^)]+\.md)\)", (ROOT / "docs" / "README.md").read_text(), re.MULTILINE)
    assert {page: title for title, page in rows} == menu | {"techniques/index.md": "Techniques"}


def test_the_readme_shows_the_test_command_that_ci_runs() -> None:
    assert "make test" in (ROOT / "README.md").read_text()
    assert re.search(r"^make test$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)


def test_every_room_has_a_line_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    rooms = [path.name for path in (ROOT / "src" / "paceline").iterdir() if (path / "__init__.py").exists()]
    assert [room for room in rooms if f"{room}/" not in readme] == []
