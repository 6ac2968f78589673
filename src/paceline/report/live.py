"""The runs in a folder while they are trained, from their files alone: a trainer does not know that it is watched.

Each look reads what is new since the last one. Anything may happen in between: a run is started, killed, resumed or
deleted, a file is half-written, the folder itself appears or goes. Nothing outside the folder is read, whatever links
lie in it.
"""

import contextlib
import os
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from paceline.core.errors import RunError
from paceline.core.units import human_seconds
from paceline.metrics.card import CARD_FILE
from paceline.metrics.records import METRICS_FILE
from paceline.report.ablation import ABLATION_FILE, Ablation, read_ablation
from paceline.report.curves import Curves, MetricsFile
from paceline.report.runs import CONFIG_FILE, Place, Run, load_run
from paceline.report.subject import Subject
from paceline.report.words import some

FILES = (CARD_FILE, CONFIG_FILE, METRICS_FILE)
QUIET_S, QUIET_STEPS = 60.0, 20
"""A run is called quiet after a minute without a record, and after so many of its own steps."""

Signature = tuple[tuple[int, int] | None, ...]
"""Of each of FILES: when it was written and its size, None if it is not there."""


@dataclass
class _Watched:
    """One run, and what its files looked like when they were read."""

    metrics: MetricsFile
    signature: Signature = ()
    run: Run | None = None
    trouble: str | None = None


@dataclass
class RunsFolder:
    root: Path
    newest: int
    """Runs that are shown: the ones written to last."""
    clock: Callable[[], float] = time.time
    _watched: dict[Path, _Watched] = field(default_factory=dict)
    _gone: list[str] = field(default_factory=list)

    def look(self) -> tuple[Subject, object]:
        """What there is now, and a value that stays equal until something changes."""
        found = dict(_run_folders(self.root))
        self._forget(set(found))
        self._gone = [name for name in self._gone if self.root / name not in found]
        latest = sorted(found, key=lambda folder: _written(found[folder]))[-self.newest :]
        for folder in sorted(latest):
            self._read(folder, found[folder])
        shown = [self._watched[folder] for folder in sorted(latest)]
        ablations, damaged = self._ablations()
        runs = _under_own_labels([one.run for one in shown if one.run is not None])
        going = [run for run in runs if not run.card.finished and run.card.ended is None]  # Ctrl-C is an end, too
        quiet = [run for run in going if self._is_quiet(run)]
        subject = Subject(
            runs=runs,
            running=[run for run in going if run not in quiet],
            left_out=[*damaged, *(one.trouble for one in shown if one.trouble is not None)],
            ablations=ablations,
            notes=self._notes(len(shown), len(found), quiet),
        )
        return subject, ([(folder, found[folder]) for folder in sorted(latest)], ablations, damaged, subject.notes)

    def _ablations(self) -> tuple[list[Ablation], list[str]]:
        """Those that are done. The file is small and comes last, so it is read anew at every look."""
        found, damaged = [], []
        for folder in (self.root, *sorted(_folders(self.root, self.root))):
            if _look_at(folder / ABLATION_FILE, self.root) is None:
                continue
            try:
                found.append(read_ablation(folder))
            except RunError as error:
                damaged.append(str(error))
        return found, damaged

    def _forget(self, there: set[Path]) -> None:
        for folder in self._watched.keys() - there:
            self._gone.append(str(folder.relative_to(self.root)))
            del self._watched[folder]

    def _read(self, folder: Path, signature: Signature) -> None:
        watched = self._watched.setdefault(folder, _Watched(MetricsFile(folder)))
        if watched.signature == signature:
            return
        there = dict(zip(FILES, signature, strict=True))
        try:
            if there[CONFIG_FILE] is None:
                raise RunError(f"{folder / CONFIG_FILE}: is not there, or leads out of the folder that is watched")
            read_curves = Curves.none if there[METRICS_FILE] is None else watched.metrics.read
            run = load_run(Place(folder), read_curves, [])
            watched.run, watched.trouble = run, None
        except RunError as error:
            watched.run, watched.trouble, watched.metrics = None, str(error), MetricsFile(folder)
        watched.signature = signature

    def _notes(self, num_shown: int, num_found: int, quiet: list[Run]) -> list[str]:
        notes = [f"The {num_shown} newest of {num_found} runs in the folder."] if num_found > num_shown else []
        for run in quiet:
            minutes_s = 60.0 * (self._silent_s(run) // 60)  # by the minute, or the page would change every second
            notes.append(f"{run.label}: nothing new for {human_seconds(minutes_s)}; it was killed, or hangs.")
        return [*notes, f"Deleted: {some(self._gone[::-1])}."] if self._gone else notes

    def _is_quiet(self, run: Run) -> bool:
        """Of a run that should be writing."""
        steps_s = np.diff(run.curves.steps["wall_s"][-QUIET_STEPS:])
        return self._silent_s(run) >= max(QUIET_S, QUIET_STEPS * float(steps_s.mean()) if len(steps_s) else 0.0)

    def _silent_s(self, run: Run) -> float:
        return self.clock() - _written(self._watched[run.folder].signature)


def _run_folders(root: Path) -> Iterator[tuple[Path, Signature]]:
    """The folder itself, its folders and theirs (an ablation's runs), where there is a card and nothing leads out."""
    outer = _folders(root, root)
    for folder in (root, *outer, *(inner for one in outer for inner in _folders(one, root))):
        signature = tuple(_look_at(folder / name, root) for name in FILES)
        if signature[0] is not None:
            yield folder, signature


def _folders(folder: Path, root: Path) -> list[Path]:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        return [Path(entry.path) for entry in entries if _is_folder(entry, root)]
    return []


def _is_folder(entry: "os.DirEntry[str]", root: Path) -> bool:
    if entry.is_symlink():
        return os.path.isdir(entry.path) and _is_inside(entry.path, root)
    return entry.is_dir()


def _is_inside(path: str | Path, root: Path) -> bool:
    """Where a link leads to."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root))


def _look_at(path: Path, root: Path) -> tuple[int, int] | None:
    """A pipe or a device under the name of a file could be waited for for ever, so only files count."""
    with contextlib.suppress(OSError):
        found = path.lstat()
        if stat.S_ISLNK(found.st_mode) and _is_inside(path, root):
            found = path.stat()
        if stat.S_ISREG(found.st_mode):
            return found.st_mtime_ns, found.st_size
    return None


def _written(signature: Signature) -> float:
    """When a run last wrote something, in seconds."""
    return max(when for when, _ in filter(None, signature)) / 1e9


def _under_own_labels(runs: list[Run]) -> list[Run]:
    """Runs of one name, in different folders, are told apart by those."""
    names = [run.label for run in runs]
    return [
        replace(run, label=f"{run.folder.parent.name}/{run.label}") if names.count(run.label) > 1 else run
        for run in runs
    ]
