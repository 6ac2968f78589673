"""What `python -m build` makes of this tree."""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SHIPPED = (
    "LICENSE",
    "README.md",
    "CHANGELOG.md",
    "CITATION.cff",
    "CONTRIBUTING.md",
    "constraints.txt",
    "pyproject.toml",
)


def build(tree: Path, *options: str) -> Path:
    """The folder with the archive and the wheel that is made from it, built from a copy in the empty folder `tree`."""
    for name in (*SHIPPED, "MANIFEST.in", "Makefile"):
        shutil.copy(ROOT / name, tree)
    shutil.copytree(ROOT / "src", tree / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    # without isolation: tests have no network to fetch the build's own requirements from
    command = [sys.executable, "-m", "build", "--no-isolation", *options, str(tree)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Deprecat" not in done.stdout + done.stderr
    return tree / "dist"
