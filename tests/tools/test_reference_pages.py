"""The reference is what the code says, and says all of it."""

import importlib
import re

import pytest

from paceline import library
from paceline.cli import VERBS
from paceline.core.schema import flatten
from paceline.recipes.presets import preset
from pages import filled

PAGES = {page: filled(page) for page in ("reference/commands.md", "reference/settings.md", "reference/python.md")}
FLAG = re.compile(r"--[a-z][a-z0-9.-]*")
SETTING = re.compile(r"^\| `([a-z0-9_.]+)` \| .+ \| .+ \| .*\|$", re.MULTILINE)

NO_FLAGS = {
    "--plugins",
    "--preset",
    "--stages",
    "--model.long-window",
    "--model.layer-overrides",
    "--model.mixes",
    "--model.loss-terms",
    "--optim.groups",
}
"""Settings that only a preset or a config file can give."""


def section(page: str, heading: str) -> str:
    found = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", PAGES[page], re.MULTILINE | re.DOTALL)
    assert found, f"{page} has no section {heading}"
    return found[1]


def test_every_setting_of_a_run_is_there_once() -> None:
    settings = [name for name, _ in flatten(preset("demo")) if name != "preset"]  # which is no flag
    assert sorted(SETTING.findall(PAGES["reference/settings.md"])) == sorted(settings)


def test_a_setting_that_no_flag_gives_says_so() -> None:
    rows = re.findall(r"^\| `([a-z0-9_.]+)` \| .* No flag\. \|$", PAGES["reference/settings.md"], re.MULTILINE)
    assert {f"--{name.replace('_', '-')}" for name in rows} == NO_FLAGS - {"--preset"}


def test_every_verb_has_its_section() -> None:
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
    settings = {f"--{name.replace('_', '-')}" for name, _ in flatten(preset("demo"))} - NO_FLAGS
    expected = options | (settings if "(settings.md)" in shown else set())
    assert without_negations(helped) - {"--help"} == without_negations(expected)


def test_every_name_of_the_package_has_a_section() -> None:
    sections = re.findall(r"^## (.+)$", PAGES["reference/python.md"], re.MULTILINE)
    assert set(library.__all__) <= set(sections)
    for member in ("card", "steps", "evaluations", "generate", "stream", "loaded"):
        assert f"### Run.{member}\n" in PAGES["reference/python.md"]
