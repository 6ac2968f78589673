"""Every command that a page shows is run, and so is its Python: exit code 0, no traceback, and the output it shows.

A page is followed from top to bottom in a folder of its own. What a command reads and the page has not made comes from
`world.py`; what would take long is made small by the rules of `smaller.py`. What no CPU machine without a network can
run is in one table below, with the test that comes nearest.
"""

import json
import re
import shlex
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

import paceline
from journeys.pages import Shown, all_shown
from journeys.running import Outcome, Runner, process
from journeys.smaller import verb_of
from journeys.world import World
from paceline.checkpoint.run_folder import latest_run
from paceline.metrics.card import read_card
from test_documents import ROOT

pytestmark = pytest.mark.journey
SHOWN = all_shown()
FROM_CODE = ("diff", "presets", "plan")


@dataclass(frozen=True)
class Elsewhere:
    shown: str
    """Pattern of `page: command`."""
    why: str
    instead: str
    """The test that comes nearest, as `tests/FILE.py::NAME`."""


ELSEWHERE = (
    Elsewhere(
        r": torchrun --nnodes \d",
        "needs several machines",
        "tests/parallel/test_two_hosts.py::test_a_rank_killed_on_one_of_two_hosts_is_replaced_and_the_run_goes_on",
    ),
    Elsewhere(
        ": sky launch",
        "needs an account with a cloud",
        "tests/test_examples.py::test_the_skypilot_file_starts_a_run_that_parses",
    ),
    Elsewhere(
        ": make (test-all|soak)",
        "takes an hour and more",
        "tests/train/test_kills.py::test_killed_at_a_shard_edge_in_a_validation_and_in_a_save",
    ),
    Elsewhere(
        r": python benchmarks/ablations\.py",
        "trains for hours",
        "tests/commands/test_ablate.py::test_a_small_ablation_runs_to_its_waterfall_and_is_not_run_twice",
    ),
    Elsewhere(
        r": python benchmarks/resume_gpu\.py",
        "needs a GPU",
        "tests/train/test_kills.py::test_sigterm_ends_soon_with_a_checkpoint_and_costs_nothing",
    ),
    Elsewhere(
        r": python benchmarks/serve_load\.py",
        "takes minutes",
        "tests/serving/test_load.py::test_64_streams_go_on_without_an_error_and_memory_stays",
    ),
    Elsewhere(
        r"docs/own-(technique|optimizer)\.md: (python|paceline train)",
        "follows changes of the code",
        "tests/journeys/test_walk_throughs.py::test_a_walk_through_can_be_walked",
    ),
    Elsewhere(
        ": make mutants",
        "takes an hour",
        "tests/tools/test_mutants.py::test_a_mutant_is_killed_by_a_test_that_fails_and_taken_back",
    ),
    Elsewhere(
        ": make site",
        "builds the site as its tests do",
        "tests/journeys/test_site.py::test_every_page_of_docs_is_there",
    ),
)


def elsewhere(shown: Shown) -> Elsewhere | None:
    return next((entry for entry in ELSEWHERE if re.search(entry.shown, f"{shown.page}: {shown.text}")), None)


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="session")
def readers(world: World, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Runner]:
    pages = dict.fromkeys(shown.page for shown in SHOWN)
    return {page: Runner(tmp_path_factory.mktemp("page"), world, {"paceline": paceline}) for page in pages}


@pytest.mark.parametrize("shown", [one for one in SHOWN if elsewhere(one) is None], ids=str)
def test_what_a_page_shows_runs(shown: Shown, readers: dict[str, Runner], monkeypatch: pytest.MonkeyPatch) -> None:
    reader = readers[shown.page]
    monkeypatch.chdir(reader.folder)
    outcome = run(shown, reader, monkeypatch)
    if outcome is not None:
        reader.printed.append(outcome.out + outcome.err)
        told = f"{shown}\nas {shlex.join(outcome.words)}\n{reader.printed[-1]}"
        judge(outcome, told, refused=any(line.startswith("paceline: ") for line in shown.output))
        judge_output(shown, "\n".join(reader.printed[-shown.together :]), told)


def run(shown: Shown, reader: Runner, patch: pytest.MonkeyPatch) -> Outcome | None:
    """None: checked by other means than running it."""
    if shown.language == "python":
        return reader.python(shown.text, patch)
    program, *words = shlex.split(shown.text)
    if program == "make" and (ours := paceline_words_of(target=words[0])):
        program, words = "paceline", ours
    if program == "paceline":
        return reader.paceline(words, patch, inline=shown.inline)
    if program == "torchrun":
        return reader.torchrun(words)
    if program == "python":
        return reader.tool(words)
    assert program in ("make", "pip"), f"{shown}: no rule runs this; add one, or a row to ELSEWHERE"
    if program == "pip":
        assert_installable(words)
    return None


def judge(outcome: Outcome, told: str, *, refused: bool) -> None:
    """By exit code, by what is left, and by what must not be said; `refused`: the page shows a mistake being told."""
    words = outcome.words
    assert outcome.code == (2 if refused else 0), told
    assert "Traceback" not in outcome.out + outcome.err, told
    assert "no report:" not in outcome.out, told
    if refused or "--help" in words:
        return
    if "--out" in words:
        assert Path(words[words.index("--out") + 1]).exists(), told
    if "--json" in words:
        json.loads(outcome.out)
    if words and verb_of(words) == "train":
        assert read_card(latest_run().path).finished, told


def judge_output(shown: Shown, said: str, told: str) -> None:
    """Of what depends on nothing but the code, every line that is shown occurs; else the first, with other figures."""
    verb = verb_of(shlex.split(shown.text)[1:]) if shown.language == "shell" else ""
    lines = [line for line in shown.output if "…" not in line]
    if verb in FROM_CODE:
        assert set(map(_one_spaced, lines)) <= set(map(_one_spaced, said.splitlines())), told
    elif lines and verb != "sample":  # what a model writes is its own
        assert _folded(lines[0]) in [_folded(line) for line in said.splitlines()], told


def _one_spaced(line: str) -> str:
    """A page may have left out the widest cell of a column."""
    return " ".join(line.split())


def _folded(line: str) -> str:
    """Also without what depends on size and machine: figures and units."""
    return _one_spaced(re.sub(r"[KMGT]iB", "B", re.sub(r"\d[\w.,]*", "0", line)))


def paceline_words_of(target: str) -> list[str]:
    """What a target runs of ours; one that runs other programs is run by CI itself."""
    recipe = process(["make", "-n", target], folder=ROOT)
    assert recipe.code == 0, recipe.err
    if ours := re.search(r"^\.venv/bin/paceline (.*)$", recipe.out, re.MULTILINE):
        return shlex.split(ours[1])
    assert re.search(rf"^make {target}$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE), f"nothing runs {target}"
    return []


def assert_installable(words: list[str]) -> None:
    """There is no package index in a test: our extras exist, and other packages are among the pinned ones."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    pinned = re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text().replace("_", "-"), re.MULTILINE)
    assert words[0] in ("install", "show")
    for requirement in (word for word in words[1:] if not word.startswith("-")):
        name, _, chosen = requirement.rstrip("]").partition("[")
        if name in ("paceline", "."):
            assert set(filter(None, chosen.split(","))) <= set(extras), f"{requirement}: no such extra"
        else:
            assert name in pinned, f"{name}: neither ours nor pinned"


@pytest.mark.parametrize("entry", ELSEWHERE, ids=lambda entry: entry.shown)
def test_what_is_run_elsewhere_is_shown_and_its_test_exists(entry: Elsewhere) -> None:
    assert any(elsewhere(shown) == entry for shown in SHOWN), "no page shows it any more"
    file, _, name = entry.instead.partition("::")
    assert re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.MULTILINE), f"{entry.instead}: there is none"
