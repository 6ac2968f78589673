"""Carrying out the runs of a plan: some at a time, going on where an earlier command stopped, ending well on Ctrl-C.

One loop polls the children. A run that fails is reported by the last line of its log. A second signal ends all at once.
"""

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from paceline.core.signals import stop_on_signals
from paceline.lab.ablate.arms import Run
from paceline.lab.ablate.outcomes import Outcome, outcome_of
from paceline.recipes.plugins import plugin_words

POLL_S = 0.2


class Child(Protocol):
    def poll(self) -> int | None: ...  # the exit code, or None while it runs

    def ask_to_stop(self) -> None: ...  # it should save and end

    def kill(self) -> None: ...


Launch = Callable[[Sequence[str], Path, int], Child]  # words of `paceline train`, its log, which of the jobs it is


@dataclass
class Series:
    folder: Path
    outcomes: dict[str, Outcome]  # by the run's name, in the order of the plan
    running: dict[str, Child] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)  # run to what its log ends with
    stopped_by: int | None = None  # the signal that ended the series early

    @property
    def to_do(self) -> list[Run]:
        begun = {*self.running, *self.failed}
        open_ = [one.run for one in self.outcomes.values() if one.state in ("waiting", "unfinished")]
        return [run for run in open_ if run.name not in begun]


def carry_out(
    series: Series,
    launch: Launch,
    *,
    jobs: int,
    keep_checkpoints: bool = False,
    show: Callable[[Series], None] = lambda _: None,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
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
        where, begun = str(series.folder / run.name), series.outcomes[run.name].state == "unfinished"
        words = ("--resume", where, *plugin_words(run.config), "--no-finish") if begun else (*run.words, "--out", where)
        series.running[run.name] = launch(words, series.folder / f"{run.name}.log", places[run.name])


def _collect(series: Series, name: str, *, keep_checkpoints: bool) -> None:
    """A child has ended: well, by the signal that we passed on, or badly."""
    run, code = series.outcomes[name].run, series.running.pop(name).poll()
    series.outcomes[name] = outcome_of(run, series.folder)
    if series.outcomes[name].state == "finished":
        if not keep_checkpoints:  # gigabytes at full size, and a finished run is judged by its card
            shutil.rmtree(series.folder / name / "checkpoints", ignore_errors=True)
    elif series.stopped_by is None:
        series.failed[name] = f"ended with exit code {code}: {_last_line(series.folder / f'{name}.log')}"


def _last_line(log: Path) -> str:
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    except OSError:
        lines = []
    return lines[-1].removeprefix("paceline: ") if lines else "no output"
