"""A run is a folder. This is its layout, and how one is found and opened. No torch.

runs/<name>/config.json  card.json  metrics.jsonl  tokenizer.json  checkpoints/step_000500/  report.html
"""

import contextlib
import itertools
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.core import lock
from paceline.core.errors import RunError
from paceline.core.files import check_links, write_json
from paceline.core.schema import read_json
from paceline.text.manifest import FILE_NAME as DATASET_FILE

RUNS = Path("runs")  # where runs go unless --out says otherwise
SET_ASIDE = "set_aside_"  # how a folder's name begins that holds what a restarted run had left; it is no run
LAUNCH_FILE = ".launch"  # names the launch that made the folder, if it may restart itself
_STEP_FOLDER = re.compile(r"step_([0-9]{6,18})")


@dataclass(frozen=True)
class RunFolder:
    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.json"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    def checkpoint(self, step: int) -> Path:
        return self.path / "checkpoints" / f"step_{step:06d}"

    @property
    def beginning(self) -> Path:
        """Stands for the checkpoint of step 0 until the first is saved: a run that shows it has lost none."""
        return self.path / "checkpoints" / "beginning.json"

    def checkpoints(self) -> list[Path]:
        """Published checkpoints, oldest first. Temporary folders of an interrupted save do not match."""
        found = [path for path in (self.path / "checkpoints").glob("step_*") if named_step(path) is not None]
        return sorted(found, key=step_of)

    def set_aside(self) -> list[Path]:
        """Checkpoints that a resumed run has passed over."""
        return list((self.path / "checkpoints").glob("set_aside_step_*"))

    def parts(self) -> list[Path]:
        """Each shows that there is a run, whatever became of the others."""
        return [self.beginning.parent, self.metrics, self.path / "card.json", self.config]

    def write_config(self, config: dict[str, Any]) -> None:
        write_json(self.config, config)

    def read_config(self) -> dict[str, Any]:
        value = read_json(self.config)
        if not isinstance(value, dict):
            raise RunError(f"{self.config}: not a run's configuration; the file is damaged")
        return value


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step_"))


def named_step(folder: Path) -> int | None:
    """The step in a checkpoint's name; None: somebody has renamed it."""
    found = _STEP_FOLDER.fullmatch(folder.name)
    return None if found is None else int(found.group(1))


def open_run(where: str | Path) -> RunFolder:
    """The run at a path, or by name under `runs/`, or `latest`. It may be from anybody: see `check_links`."""
    run = _found(where)
    check_links(run.path)
    return run


def _found(where: str | Path) -> RunFolder:
    if not str(where):
        raise RunError(f"'': names no run; give a run's folder, its name under {RUNS}/, or `latest`")
    if str(where) == "latest":
        return latest_run()
    for path in (Path(where), RUNS / str(where)):
        if (path / "config.json").is_file() or RunFolder(path).checkpoints():  # a checkpoint has the config, too
            return RunFolder(path)
        if path.is_dir():
            why = "so it is not a run or its start was interrupted"
            raise RunError(f"{path}: no config.json in it, {why}; train again")
    names = sorted(path.parent.name for path in RUNS.glob("*/config.json"))
    known = f"there are {', '.join(names)}" if names else "start one with `paceline train`"
    raise RunError(f"{where}: no such run; give a run's folder, its name under {RUNS}/, or `latest`; {known}")


def latest_run() -> RunFolder:
    newest = max(RUNS.glob("*/config.json"), key=lambda path: path.stat().st_mtime_ns, default=None)
    if newest is None:
        raise RunError(f"{RUNS}: holds no run yet; start one with `paceline train`")
    return RunFolder(newest.parent)


def only_writer(path: Path) -> contextlib.AbstractContextManager[int | None]:
    """Of the run in this folder, from before its first file to its end."""
    busy = f"{path}: another process trains this run; wait until it has ended, or start one in another folder"
    return lock.only_writer(path, RunError(busy))


@contextlib.contextmanager
def new_run(name: str, out: str | None, *, launch: str | None = None) -> Iterator[RunFolder]:
    """A folder without a run that no other process trains in: `out`, or else `runs/<name>`, numbered if that is taken.
    A `launch` that is restarted finds the one that it has begun to fill. A new folder goes if an error ends the block
    before anything was written."""
    path, made = _chosen(name, out, launch)
    try:
        with only_writer(path):
            _check_free(path, launch)
            if launch is not None:
                try:
                    (path / LAUNCH_FILE).write_text(launch, encoding="utf-8")
                except OSError as error:
                    raise RunError(f"--out {path}: cannot be written ({error.strerror})") from None
            yield RunFolder(path)
    except BaseException:
        if made and all(found.name == LAUNCH_FILE for found in path.iterdir()):
            (path / LAUNCH_FILE).unlink(missing_ok=True)
            path.rmdir()
        raise


def _chosen(name: str, out: str | None, launch: str | None) -> tuple[Path, bool]:
    """Where a new run goes, and whether the folder was made for it just now."""
    if out == "":
        raise RunError(f"--out '': names no folder; leave it out for one in {RUNS}/")
    if out is not None:
        return Path(out), _make(Path(out))
    for path in (RUNS / (name if number == 1 else f"{name}-{number}") for number in itertools.count(1)):
        if (begun := _is_of(launch, path)) or _make(path):
            return path, not begun
    raise AssertionError("numbers never end")


def _make(path: Path) -> bool:
    """Whether it was not there before."""
    try:
        path.mkdir(parents=True)
    except OSError as error:
        if path.exists():
            return False
        raise RunError(f"--out {path}: cannot be made ({error.strerror})") from None
    return True


def _check_free(path: Path, launch: str | None) -> None:
    run = RunFolder(path)
    if not path.is_dir():
        raise RunError(f"--out {path}: is no folder; choose another")
    check_links(path)
    if any(map(os.path.lexists, run.parts())) and not _is_of(launch, path):
        raise RunError(f"--out {path}: holds a run already; choose another folder or continue it with --resume {path}")
    if (path / DATASET_FILE).exists() or any(path.glob("*.bin")):
        raise RunError(f"--out {path}: holds data, whose tokenizer the run would replace; choose another folder")


def _is_of(launch: str | None, path: Path) -> bool:
    file = path / LAUNCH_FILE
    return launch is not None and file.is_file() and file.read_text(encoding="utf-8") == launch
