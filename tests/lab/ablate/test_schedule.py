"""Runs are made some at a time, gone on with, told when they fail, and ended well."""

import signal
from pathlib import Path

import pytest

from lab.ablate.pretended import Pretender, small_plan, write_run
from paceline.core.errors import UserError
from paceline.lab.ablate.local import local_launch, locked
from paceline.lab.ablate.outcomes import outcomes
from paceline.lab.ablate.schedule import Series, carry_out

PLAN = small_plan(only="softcap-15", seeds=2)
RUNS = {run.name: run for run in PLAN.runs}


def series_in(folder: Path) -> Series:
    return Series(folder, {one.run.name: one for one in outcomes(PLAN.runs, folder)})


def no_sleep(_: float) -> None:
    pass


@pytest.mark.parametrize("jobs", [1, 3, 20])
def test_all_runs_are_made_in_order_and_never_more_than_jobs_at_a_time(jobs: int, tmp_path: Path) -> None:
    launch, series = Pretender(tmp_path, RUNS), series_in(tmp_path)
    carry_out(series, launch, jobs=jobs, sleep=no_sleep)
    assert [Path(words[-1]).name for words, _ in launch.started] == list(RUNS)
    assert launch.most_at_a_time == min(jobs, len(RUNS))
    assert {place for _, place in launch.started} == set(range(min(jobs, len(RUNS))))
    assert all(one.state == "finished" for one in series.outcomes.values())


def test_finished_runs_are_kept_and_an_unfinished_one_is_resumed(tmp_path: Path) -> None:
    first, second, *rest = RUNS.values()
    write_run(first, tmp_path, 6.0)
    write_run(second, tmp_path, 7.0, finished=False)
    launch = Pretender(tmp_path, RUNS)
    carry_out(series_in(tmp_path), launch, jobs=1, sleep=no_sleep)
    assert launch.started[0][0] == ("--resume", str(tmp_path / second.name), "--no-finish")
    assert [words[0] for words, _ in launch.started[1:]] == [run.config.preset for run in rest]


def test_a_refused_run_is_not_touched(tmp_path: Path) -> None:
    first = next(iter(RUNS.values()))
    write_run(first, tmp_path, 6.0)
    (tmp_path / first.name / "card.json").write_text("{")
    launch = Pretender(tmp_path, RUNS)
    carry_out(series_in(tmp_path), launch, jobs=1, sleep=no_sleep)
    assert len(launch.started) == len(RUNS) - 1
    assert (tmp_path / first.name / "card.json").read_text() == "{"


def test_a_run_that_fails_is_told_by_its_last_line_and_the_others_go_on(tmp_path: Path) -> None:
    bad = list(RUNS)[2]
    launch, series = Pretender(tmp_path, RUNS, codes={bad: 1}), series_in(tmp_path)
    carry_out(series, launch, jobs=2, sleep=no_sleep)
    assert series.failed == {bad: f"ended with exit code 1: no luck with {bad}"}
    assert sum(one.state == "finished" for one in series.outcomes.values()) == len(RUNS) - 1


def test_checkpoints_of_finished_runs_go_unless_they_are_wanted(tmp_path: Path) -> None:
    name = next(iter(RUNS))
    for keep in (True, False):
        folder = tmp_path / str(keep)
        (folder / name / "checkpoints" / "step_000020").mkdir(parents=True)
        (folder / name / "config.json").write_text("{}")
        write_run(RUNS[name], folder, 6.0, finished=False)
        carry_out(series_in(folder), Pretender(folder, RUNS), jobs=1, keep_checkpoints=keep, sleep=no_sleep)
        assert (folder / name / "checkpoints").exists() == keep


def test_one_signal_asks_every_child_to_stop_and_starts_no_other(tmp_path: Path) -> None:
    launch, series = Pretender(tmp_path, RUNS, polls=4, codes=dict.fromkeys(RUNS, 130)), series_in(tmp_path)
    begun = []

    def interrupt_once(_: float) -> None:
        if not begun:
            begun.extend(launch.alive)
            signal.raise_signal(signal.SIGINT)

    carry_out(series, launch, jobs=2, sleep=interrupt_once)
    assert [child.asked for child in begun] == [1, 1]
    assert not any(child.killed for child in begun)
    assert len(launch.started) == 2
    assert series.stopped_by == signal.SIGINT
    assert series.failed == {}
    assert {one.state for one in series_in(tmp_path).outcomes.values()} == {"unfinished", "waiting"}


def test_a_second_signal_ends_children_at_once(tmp_path: Path) -> None:
    launch = Pretender(tmp_path, RUNS, polls=1000)
    with pytest.raises(KeyboardInterrupt):
        carry_out(series_in(tmp_path), launch, jobs=2, sleep=lambda _: signal.raise_signal(signal.SIGINT))
    assert [child.killed for child in launch.alive] == [True, True]


def test_nobody_else_works_in_a_folder_while_a_command_or_its_child_does(tmp_path: Path) -> None:
    with locked(tmp_path) as lock:
        with pytest.raises(UserError, match="is at work there"), locked(tmp_path):
            pass
        launch = local_launch(gpus=[], jobs=2, lock=lock)
        child = launch(["no-such-preset"], tmp_path / "log", 0)
    with pytest.raises(UserError, match="is at work there"), locked(tmp_path):  # the child has inherited it
        pass
    while child.poll() is None:
        pass
    with locked(tmp_path):
        assert child.poll() == 2
    assert "no-such-preset" in (tmp_path / "log").read_text()
