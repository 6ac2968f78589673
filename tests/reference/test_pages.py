"""The reference is what the code says, and says all of it."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from paceline import library
from paceline.cli import VERBS
from paceline.core.errors import PacelineError
from paceline.core.schema import flatten
from paceline.recipes.presets import preset
from paceline.reference.commands import COMMANDS
from paceline.reference.pages import WRITTEN

ROOT = Path(__file__).parents[2]
PAGES = WRITTEN.pages()
FLAG = re.compile(r"--[a-z][a-z0-9.-]*")
SETTING = re.compile(r"^\| `([a-z0-9_.]+)` \| .+ \| .+ \| .*\|$", re.MULTILINE)


def section(page: str, heading: str) -> str:
    found = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", PAGES[page], re.MULTILINE | re.DOTALL)
    assert found, f"{page} has no section {heading}"
    return found[1]


def test_the_pages_in_docs_are_current() -> None:
    assert WRITTEN.main(["--check"]) == 0


def test_a_page_that_is_old_is_named(tmp_path: Path) -> None:
    WRITTEN.main(["--docs", str(tmp_path)])
    (tmp_path / "reference" / "settings.md").write_text("# Settings\n")
    with pytest.raises(PacelineError, match=r"settings\.md.*paceline\.reference\.pages"):
        WRITTEN.main(["--docs", str(tmp_path), "--check"])


def test_every_setting_of_a_run_is_there_once() -> None:
    settings = [name for name, _ in flatten(preset("demo")) if name != "preset"]  # which is no flag
    assert sorted(SETTING.findall(PAGES["reference/settings.md"])) == sorted(settings)


def test_every_verb_has_its_arguments_and_its_section() -> None:
    assert list(COMMANDS) == list(VERBS)
    assert re.findall(r"^## paceline (.+)$", PAGES["reference/commands.md"], re.MULTILINE) == list(VERBS)


def without_negations(flags: set[str]) -> set[str]:
    """--json stands for --no-json, too."""
    return {flag for flag in flags if not re.search(r"(^--|\.)no-", flag)}


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_has_the_options_of_its_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Where a verb takes settings, its help lists them among its options; the page sends the reader to the other."""
    module, function = VERBS[verb].run.split(":")
    with pytest.raises(SystemExit):
        getattr(importlib.import_module(f"paceline.{module}"), function)(["--help"])
    helped = set(re.findall(r"^[│| ] (?:-h, )?(--[a-z][a-z0-9.-]*)", capsys.readouterr().out, re.MULTILINE))
    shown = section("reference/commands.md", f"paceline {verb}")
    options = {flag for row in re.findall(r"^\| (`.*?) \|", shown, re.MULTILINE) for flag in FLAG.findall(row)}
    settings = {f"--{name.replace('_', '-')}" for name, _ in flatten(preset("demo"))} - {"--preset"}
    expected = options | (settings if "(settings.md)" in shown else set())
    assert without_negations(helped) - {"--help"} == without_negations(expected)


def test_every_name_of_the_package_has_a_section() -> None:
    sections = re.findall(r"^## (.+)$", PAGES["reference/python.md"], re.MULTILINE)
    assert set(library.__all__) <= set(sections)
    for member in ("card", "steps", "evaluations", "generate", "stream", "loaded"):
        assert f"### Run.{member}\n" in PAGES["reference/python.md"]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_and_rows_are_whole(page: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", PAGES[page]):
        assert (ROOT / "docs" / page).parent.joinpath(target).resolve().is_file(), target
    for rows in re.findall(r"(?:^\|.*\n)+", PAGES[page], re.MULTILINE):
        assert len({len(re.split(r"(?<!\\)\|", row)) for row in rows.splitlines()}) == 1


def test_writing_the_reference_needs_no_torch() -> None:
    code = "import sys, paceline.reference.pages as p; p.texts(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
