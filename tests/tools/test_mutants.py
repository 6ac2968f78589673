"""Mutation testing changes one place at a time, draws the same sample again, and calls killed what a test notices."""

import ast
import multiprocessing
import tomllib
from pathlib import Path

import pytest

import mutants
from mutants import EQUIVALENTS, Mutant, Suite, drawn, killer, mutants_of
from page_text import ROOT

PACKAGE = ROOT / "src" / "paceline"
SOURCE = '''"""Ends at 10."""
import os
LIMIT: "int | None" = 3
@cache(1)
def last(n: int, most: at_least(1) = 2) -> int:
    if n <= LIMIT and not os.sep:
        raise ValueError(f"{n + 1} exceeds {LIMIT}")
    os.fsync(n)
    return n * 2
'''
CHANGED = {
    'LIMIT: "int | None" = 3': ['LIMIT: "int | None" = 4', 'LIMIT: "int | None" = 2'],
    "def last(n: int, most: at_least(1) = 2) -> int:": [
        "def last(n: int, most: at_least(2) = 2) -> int:",
        "def last(n: int, most: at_least(0) = 2) -> int:",
        "def last(n: int, most: at_least(1) = 3) -> int:",
        "def last(n: int, most: at_least(1) = 1) -> int:",
    ],
    "if n <= LIMIT and not os.sep:": [
        "if n <= LIMIT or not os.sep:",
        "if n < LIMIT and not os.sep:",
        "if n <= LIMIT and (os.sep):",
    ],
    'raise ValueError(f"{n + 1} exceeds {LIMIT}")': ["pass"],
    "os.fsync(n)": ["pass"],
    "return n * 2": ["return None", "return n / 2", "return n * 3", "return n * 1"],
}


def test_each_kind_of_change_is_made_where_code_is() -> None:
    """Not in decorators, types, texts and messages; in limits beside a type."""
    found: dict[str, list[str]] = {}
    for mutant in mutants_of(SOURCE, "a.py"):
        found.setdefault(mutant.before, []).append(mutant.after)
        assert SOURCE.splitlines()[mutant.line - 1].strip() == mutant.before
    assert {before: sorted(after) for before, after in found.items()} == {b: sorted(a) for b, a in CHANGED.items()}


@pytest.mark.parametrize("file", ["settings/limits.py", "data/order.py", "optim/optimizer.py"])
def test_every_mutant_is_another_program_that_parses(file: str) -> None:
    source = (PACKAGE / file).read_text(encoding="utf-8")
    trees = {ast.dump(ast.parse(mutant.source)) for mutant in mutants_of(source, file)}
    assert ast.dump(ast.parse(source)) not in trees
    assert len(trees) > 20


def test_an_edit_elsewhere_leaves_the_sample_as_it_was(tmp_path: Path) -> None:
    for part in ("data/order.py", "settings/limits.py"):
        (tmp_path / part).parent.mkdir()
        (tmp_path / part).write_text((PACKAGE / part).read_text(encoding="utf-8"), encoding="utf-8")
    before = [str(mutant) for mutant in drawn(tmp_path, 30, seed=0)]
    assert len({mutant.partition(":")[0] for mutant in before}) == 2
    order = tmp_path / "data" / "order.py"
    order.write_text("import os  # a line more\n" + order.read_text(encoding="utf-8"), encoding="utf-8")
    assert [str(mutant) for mutant in drawn(tmp_path, 30, seed=0)] == before
    assert [str(mutant) for mutant in drawn(tmp_path, 30, seed=1)] != before


def test_the_tests_of_a_module_are_those_of_its_name_then_those_that_import_it() -> None:
    suite = Suite(ROOT / "tests")
    rounds = suite.fitting("data/order.py")
    assert rounds[0] == ["data/test_order.py"]
    assert "data/test_batches.py" in {name for names in rounds[1:] for name in names}
    assert suite.fitting("analysis/statistics.py")[0] == ["lab/test_statistics.py"]


def test_a_mutant_is_killed_by_a_test_that_fails_and_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forks = multiprocessing.get_context("forkserver")
    monkeypatch.setattr(mutants, "FORKS", forks)
    forks.set_forkserver_preload([])  # torch is not needed here
    source = "def twice(n):\n    return n * 2\n\ndef thrice(n):\n    return n * 3\n"
    for name, text in (
        ("src/paceline/__init__.py", ""),
        ("src/paceline/data/__init__.py", ""),
        ("src/paceline/data/small.py", source),
        (
            "tests/data/test_small.py",
            "from paceline.data.small import twice\n\ndef test_2():\n    assert twice(2) == 4\n",
        ),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    subjects = [m for m in mutants_of(source, "data/small.py") if m.after in ("return n * 1", "return n / 3")]
    found = {mutant.after: killer(mutant, tmp_path, Suite(tmp_path / "tests")) for mutant in subjects}
    assert found == {"return n * 1": "data/test_small.py::test_2", "return n / 3": None}
    assert (tmp_path / "src/paceline/data/small.py").read_text() == source


def test_a_run_that_was_stopped_goes_on_with_what_it_knew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subjects = drawn(PACKAGE, 3, seed=0, only="data/")
    tried: list[str | None] = []

    def killer(mutant: Mutant, tree: Path, suite: Suite, known: str | None) -> str:
        tried.append(known)
        if len(tried) == 3:
            raise KeyboardInterrupt
        return f"killer of line {mutant.line}"

    monkeypatch.setattr(mutants, "drawn", lambda *_: subjects)
    monkeypatch.setattr(mutants, "copied", lambda folder: folder)
    monkeypatch.setattr(mutants, "killer", killer)
    monkeypatch.setattr(mutants, "pytest_status", lambda *_: (0, []))
    words = ["--workers", "1", "--out", str(tmp_path / "result.json")]
    with pytest.raises(KeyboardInterrupt):
        mutants.main(words)
    assert tried == [None, None, None]
    assert mutants.main(words) == 0
    assert tried[3:] == [*(f"killer of line {mutant.line}" for mutant in subjects[:2]), None]
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


def test_equivalent_mutants_exist_and_have_a_reason() -> None:
    rows = tomllib.loads(EQUIVALENTS.read_text(encoding="utf-8"))["equivalent"]
    for file in {row["file"] for row in rows}:
        known = {str(mutant) for mutant in mutants_of((PACKAGE / file).read_text(encoding="utf-8"), file)}
        mine = {str(Mutant(file, 0, row["before"], row["after"], "")) for row in rows if row["file"] == file}
        assert mine <= known
    assert all(row["reason"] for row in rows)
