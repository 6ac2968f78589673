"""The walk-throughs work as they stand: their changes apply to this tree and touch few files, and the commands shown
succeed."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHANGE = re.compile(r"^```diff\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TOUCHED = re.compile(r"^(?:\+\+\+ b/|`)(src/paceline/[\w/.-]+)", re.MULTILINE)
BUDGETS = [
    ("own-technique.md", "## An activation", "## A loss term", 4),
    ("own-technique.md", "## A loss term", "## The page", 4),
    ("own-optimizer.md", "## In the package", None, 2),
]
"""Page, first and next heading, and files under src/ that the change between them may touch, a preset included."""
NEW_FILE = re.compile(r"^`([\w/.-]+)`, new:\n\n(`{3,})(?:py|md)\n(.*?)^\2$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^(python|paceline) (.+)$", re.MULTILINE)


@pytest.mark.parametrize(("page", "first", "after", "most"), BUDGETS)
def test_a_change_touches_few_files(page: str, first: str, after: str | None, most: int) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    start, end = text.index(f"\n{first}\n"), len(text) if after is None else text.index(f"\n{after}\n")
    changes = "".join(CHANGE.findall(text[start:end]))
    new = "".join(f"`{name}`\n" for name, *_ in NEW_FILE.findall(text[start:end]))
    assert 0 < len(set(TOUCHED.findall(changes + new))) <= most


@pytest.mark.journey
@pytest.mark.parametrize("page", ["own-technique.md", "own-optimizer.md"])
def test_a_walk_through_can_be_walked(page: str, tmp_path: Path) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    for name in ("src", "tests", "tools", "docs", "benchmarks", "pyproject.toml"):
        copied = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copied(ROOT / name, tmp_path / name)
    for change in CHANGE.findall(text):
        applied = subprocess.run(
            ["git", "apply", "-"], cwd=tmp_path, input=change, capture_output=True, text=True, check=False
        )
        assert applied.returncode == 0, f"{applied.stderr}\n{change}"
    for name, _, content in NEW_FILE.findall(text):
        (tmp_path / name).write_text(content, encoding="utf-8")
    commands = COMMAND.findall(text)
    assert {word for _, words in commands for word in words.split()} >= {"pytest", "train"}
    here = {**os.environ, "PYTHONPATH": str(tmp_path / "src"), "OMP_NUM_THREADS": "1"}
    for program, shown in commands:
        words = shlex.split(shown.replace("SEED", "0"))
        if program == "paceline":
            words = ["-m", "paceline.cli", *words, "--steps", "2"]
        ended = subprocess.run(
            [sys.executable, *words], cwd=tmp_path, env=here, capture_output=True, text=True, check=False
        )
        assert ended.returncode == 0, f"{program} {shown}\n{ended.stdout[-4000:]}{ended.stderr[-1000:]}"
