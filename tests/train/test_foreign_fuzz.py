"""Whole run folders from somebody who means harm: every command gives a result or one line, and nothing else happens.

The default suite takes twenty, the soak five hundred. A folder is made again from its number: see `Sender`."""

import json
import os
import shutil
import stat
import subprocess
import sys
import time
import unicodedata
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import paceline
from train.foreign import CANARY, COMMANDS, EXPORTED, FOREIGN, OWNED, SECRET, Sender, make_world, remove
from train.soaking import note_result

SAMPLE, WHOLE = 20, 500
MOST_BYTES = 1 << 30
"""Memory that a command may take beyond what the process held."""
TURNING = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
LIBRARY = "plotly-"
LOOKS = "runs/.looks.json"
"""What `report` and `compare` write beside the runs."""


class Victim:
    """Commands in a process with limits; another one after one has ended it."""

    def __init__(self, world: Path) -> None:
        self.world, self.log = world, world.parent / "trouble"
        for folder in ("home/tmp", "home/cache"):
            (world / folder).mkdir(parents=True, exist_ok=True)
        home = {
            name: str(world / "home") for name in ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "PACELINE_CACHE_DIR")
        }
        paths = os.pathsep.join([str(Path(paceline.__file__).parent.parent), str(Path(__file__).parent.parent)])
        cache = str(world / "home" / "cache")  # torch leaves the one of this process in the environment
        self.environment = os.environ | home | {
            "TMPDIR": str(world / "home" / "tmp"), "TORCHINDUCTOR_CACHE_DIR": cache,
            "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1", "COLUMNS": "200", "PYTHONUTF8": "1",
        }  # fmt: skip
        self.process: subprocess.Popen[str] | None = None

    def answers(self) -> dict[str, Any] | str:
        """Of every command, or how the process has ended."""
        if self.process is None:
            with open(self.log, "w") as log:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", "train.foreign_victim"], cwd=self.world, env=self.environment,
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True,
                )  # fmt: skip
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(COMMANDS) + "\n")
        self.process.stdin.flush()
        if line := self.process.stdout.readline():
            found: dict[str, Any] = json.loads(line)
            return found
        return f"the process ended with {self.end()}: {self.log.read_text()[-3000:]}"

    def end(self) -> int | None:
        if self.process is None:
            return None
        self.process.kill()
        self.process.communicate()
        process, self.process = self.process, None
        return process.returncode


def content(world: Path) -> dict[str, tuple[int, bytes]]:
    """All that lies outside the folder, without what commands are to write."""
    found = {}
    for place, folders, files in os.walk(world):
        here = Path(place).relative_to(world)
        folders[:] = [name for name in folders if here / name not in (FOREIGN, EXPORTED, Path("home"))]
        for name in (*folders, *(name for name in files if not name.startswith(LIBRARY))):
            path = Path(place, name)
            kind = path.lstat().st_mode
            held = (
                path.read_bytes() if stat.S_ISREG(kind) else str(path.readlink()).encode() if path.is_symlink() else b""
            )
            found[str(path.relative_to(world))] = kind, held
    return found


def steers(text: str) -> list[str]:
    """Characters that would steer a terminal."""
    return [
        c for c in text
        if (unicodedata.category(c) == "Cc" and c not in "\n\t") or unicodedata.bidirectional(c) in TURNING
    ]  # fmt: skip


def wrong(name: str, found: dict[str, Any]) -> list[str]:
    """What a command's answer must not be."""
    code, out, err = found["code"], found["out"], found["err"]
    problems = [f"did {crime}" for crime in found["crimes"]]
    if found["trace"]:
        problems.append(f"raised {found['trace'][-1500:]}")
    elif type(code) is not int or code not in (0, 1, 2):
        problems.append(f"ended with {code!r}")
    if found["bytes"] > MOST_BYTES or "not enough memory" in err:
        problems.append(f"took {found['bytes'] / 2**20:,.0f} MiB; {err:.200}")
    if (bad := steers(out + err)) or SECRET in out + err or "Traceback" in out + err:
        problems.append(f"printed {bad} {out + err!r:.600}")
    if strange := [line for line in err.splitlines() if not line.startswith("paceline: ")]:
        problems.append(f"said {strange!r:.600}")
    verified = name.startswith("verify") and code == 1
    if code in (1, 2) and not verified and (len(err.splitlines()) != 1 or (out and name != "resume")):
        problems.append(f"answered with other than a line: {out!r:.300} {err!r:.300}")
    return [f"{name}: {problem}" for problem in problems]


def left(world: Path) -> list[str]:
    """What a page or an export must not hold."""
    page, exported = world / FOREIGN / "report.html", world / EXPORTED
    problems = []
    if page.is_file() and not page.is_symlink() and OWNED in page.read_text(errors="replace"):
        problems.append("report: their markup stands on the page")
    for path in exported.rglob("*"):
        if path.is_symlink() or (path.is_file() and SECRET.encode() in path.read_bytes()):
            problems.append(f"export: {path.relative_to(world)} is not of the folder")
    return problems


def fuzz(world: Path, numbers: range) -> tuple[list[str], Counter[str]]:
    """What went wrong, and how many commands gave a result, found something damaged, or refused."""
    make_world(world)
    victim, trouble, codes = Victim(world), list[str](), Counter[str]()
    try:
        for number in numbers:
            for folder in (FOREIGN, EXPORTED):
                remove(world / folder)
            changes = Sender(world, number).make()
            before = content(world)
            answers = victim.answers()
            after = content(world)
            if isinstance(answers, str):
                problems = [answers]
            else:
                problems = [problem for name, found in answers.items() for problem in wrong(name, found)]
                codes.update(f"{name}: {found['code']}" for name, found in answers.items())
            for path in sorted(before.keys() | after.keys()):
                if before.get(path) != after.get(path) and path != LOOKS:
                    problems.append(f"{path} has changed")
            problems += left(world)
            trouble += [f"{number} ({'; '.join(changes)}): {problem}" for problem in problems]
            if any(problem.endswith("has changed") for problem in problems):
                remove(world / CANARY)
                shutil.rmtree(world / "runs")
                shutil.rmtree(world / "data")
                make_world(world)
    finally:
        victim.end()
    return trouble, codes


@pytest.mark.journey
def test_a_folder_from_others_is_answered_in_one_line_and_touches_nothing_else(tmp_path: Path) -> None:
    trouble, codes = fuzz(tmp_path / "world", range(SAMPLE))
    assert not trouble, "\n".join(trouble)
    assert {code for name in codes for code in name.split()[-1]} == {"0", "1", "2"}


@pytest.mark.soak
def test_hundreds_of_folders_from_others(tmp_path: Path) -> None:
    began = time.monotonic()
    trouble, codes = fuzz(tmp_path / "world", range(WHOLE))
    assert not trouble, "\n".join(trouble)
    note_result("foreign run folders", folders=WHOLE, codes=dict(sorted(codes.items())), began=began)
