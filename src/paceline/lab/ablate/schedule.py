"""Carrying out the runs of a plan: some at a time, going on where an earlier command stopped, ending well on Ctrl-C.

One loop polls the children; there are no threads. A run that fails is told by the last line of its log, and the others
go on. The first signal asks every child to save and end; a second one ends them at once.
"""

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline.lab.ablate.children import Child, Launch
from paceline.lab.ablate.outcomes import Outcome, outcome_of
from paceline.lab.ablate.plan import Run
from paceline.train.stop import stop_on_signals

POLL_S = 0.2


@dataclass
class Series:
    """Where a series of runs stands, for whoever shows it."""

    folder: Path
    outcomes: dict[str, Outcome]
    """By the run's name, in the order of the plan."""
    running: dict[str, Child] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    """Run to what its log ends with."""
    stopped_by: int | None = None
    """The signal that ended the series early."""

    @property
    def to_do(self) -> list[Run]:
        return [
            one.run
            for name, one in self.outcomes.items()
            if one.state in ("waiting", "unfinished") and name not in self.running and name not in self.failed
        ]


def carry_out(
    series: Series,
    launch: Launch,
    *,
    jobs: int,
    keep_checkpoints: bool = False,
    show: Callable[[Series], None] = lambda _: None,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Run what is to be done, `jobs` at a time."""
    places: dict[str, int] = {}
    try:
        with stop_on_signals() as stop:
            while series.running or (series.to_do and not stop):
                _fill(series, launch, places, jobs=0 if stop else jobs)
                show(series)
                sleep(POLL_S)
                if stop and series.stopped_by is None:
                    series.stopped_by = stop.signal_number
                    for child in series.running.values():
                        child.ask_to_stop()
                for name in [name for name, child in series.running.items() if child.poll() is not None]:
                    del places[name]
                    _collect(series, name, keep_checkpoints=keep_checkpoints)
            series.stopped_by = stop.signal_number
        show(series)
    finally:
        for child in series.running.values():
            child.kill()


def _fill(series: Series, launch: Launch, places: dict[str, int], *, jobs: int) -> None:
    for run in series.to_do[: max(0, jobs - len(series.running))]:
        places[run.name] = next(place for place in range(jobs) if place not in places.values())
        words = words_of(series.outcomes[run.name], series.folder)
        series.running[run.name] = launch(words, log_of(series.folder, run), places[run.name])


def words_of(outcome: Outcome, folder: Path) -> Sequence[str]:
    """A run that was begun is resumed; its folder knows the rest."""
    where = str(folder / outcome.run.name)
    if outcome.state == "unfinished":
        return ("--resume", where, "--no-finish")
    return (*outcome.run.words, "--out", where)


def log_of(folder: Path, run: Run) -> Path:
    """What a run says, beside its folder."""
    return folder / f"{run.name}.log"


def _collect(series: Series, name: str, *, keep_checkpoints: bool) -> None:
    """A child has ended: well, by the signal that we passed on, or badly."""
    run, code = series.outcomes[name].run, series.running.pop(name).poll()
    series.outcomes[name] = outcome_of(run, series.folder)
    if series.outcomes[name].state == "finished":
        if not keep_checkpoints:  # gigabytes at full size, and a finished run is judged by its card
            shutil.rmtree(series.folder / name / "checkpoints", ignore_errors=True)
    elif series.stopped_by is None:
        series.failed[name] = f"ended with exit code {code}: {_last_line(log_of(series.folder, run))}"


def _last_line(log: Path) -> str:
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    except OSError:
        lines = []
    return lines[-1].removeprefix("paceline: ") if lines else "it said nothing"
