"""Room for techniques: one further change of each kind in the design applies to this tree, works, and stays small.

Each patch in `changes/` holds its part of src/, a setting of the demo preset that switches it on, and tests. One that
no longer applies is mended in the commit that moved the code it changes.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHANGES = Path(__file__).parent / "changes"
BUDGETS = {
    "growing-batch": 3,
    "third-window": 3,
    "second-loss-term": 4,
    "hashed-table": 5,
    "third-optimizer-rule": 2,
    "uniform-average": 3,
    "fp8-mlp": 4,
    "kv-heads-by-layer": 2,
    "another-gpu-generation": 2,
}
"""Files under src/ that such a change may touch, new ones and the preset included."""


@pytest.mark.parametrize("name", BUDGETS)
def test_a_change_still_applies_to_this_tree(name: str) -> None:
    """In the quick suite, for whoever moves code that a patch changes."""
    _run(["git", "apply", "--check", str(CHANGES / f"{name}.patch")], ROOT)


@pytest.mark.journey
@pytest.mark.parametrize("name", BUDGETS)
def test_a_change_of_each_kind_fits_its_budget_of_files(name: str, tmp_path: Path) -> None:
    patch = (CHANGES / f"{name}.patch").read_text(encoding="utf-8")
    touched = re.findall(r"^\+\+\+ b/(\S+)$", patch, re.MULTILINE)
    source = [path for path in touched if path.startswith("src/")]
    assert 0 < len(source) <= BUDGETS[name], source
    for folder in ("src", "tests", "pyproject.toml"):
        copied = shutil.copytree if (ROOT / folder).is_dir() else shutil.copy
        copied(ROOT / folder, tmp_path / folder)
    _run(["git", "apply", "-"], tmp_path, patch)
    tests = [path for path in touched if Path(path).name.startswith("test_")]
    assert tests, "a change without a test"
    _run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests], tmp_path)
    words = ["train", "demo", "--steps", "3", "--evaluate.tokens", "2048", "--no-finish", "--out", "run"]
    _run([sys.executable, "-m", "paceline.cli", *words], tmp_path)


def test_every_patch_has_a_budget() -> None:
    assert {path.stem for path in CHANGES.glob("*.patch")} == set(BUDGETS)


def _run(command: list[str], folder: Path, given: str | None = None) -> None:
    here = {**os.environ, "PYTHONPATH": str(folder / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=here, input=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}{done.stderr[-1000:]}"
