"""The size of the source, and of the core: what a plain run executes."""

import subprocess
import sys
from pathlib import Path

import paceline

ROOT = Path(paceline.__file__).parent
CORE = ("data", "model", "optim", "train", "checkpoint")
RUN = """
import sys, threading
seen = set()
def note(frame, event, argument):
    seen.add(frame.f_code.co_filename)
sys.settrace(note); threading.settrace(note)
from paceline.cli import main
main(["train", "demo", "--steps", "2", "--out", sys.argv[1]])
sys.settrace(None)
print("\\n".join(sorted(seen)), file=open(sys.argv[2], "w"))
"""


def lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def test_the_source_is_at_most_33_000_lines() -> None:
    kinds = {".py", ".toml", ".js", ".css", ".html"}
    assert sum(lines(path) for path in ROOT.rglob("*") if path.suffix in kinds) <= 33_000


def test_a_run_of_two_steps_executes_at_most_40_files_of_the_core(tmp_path: Path) -> None:
    """Each file counts whole, whichever of its lines were executed."""
    listed = tmp_path / "files.txt"
    subprocess.run([sys.executable, "-c", RUN, tmp_path / "run", listed], check=True, capture_output=True)
    paths = {Path(name) for name in listed.read_text(encoding="utf-8").splitlines()}
    core = {
        path: n
        for path in paths
        if path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in CORE
        if (n := lines(path))
    }
    assert any(path.name == "loop.py" for path in core)
    assert len(core) <= 40, sorted(path.name for path in core)
    assert sum(core.values()) <= 4_000, core
