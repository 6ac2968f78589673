"""What a person sees: how long it will take, where the runs stand, what came out."""

import io
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from lab.ablate.pretended import PretendedChild, Pretender, small_plan, write_all, write_run
from paceline.lab.ablate.ablation_text import Progress, seconds_left, show_ablation, time_left
from paceline.lab.ablate.effects import conclude
from paceline.lab.ablate.outcomes import outcomes
from paceline.lab.ablate.schedule import Series

PLAN = small_plan(only="softcap-15", seeds=2)
RUNS = {run.name: run for run in PLAN.runs}


def text_console(*, terminal: bool) -> tuple[Console, Callable[[], str]]:
    file = io.StringIO()
    return Console(file=file, width=150, force_terminal=terminal, color_system=None), file.getvalue


def series_in(folder: Path) -> Series:
    return Series(folder, {one.run.name: one for one in outcomes(PLAN.runs, folder)})


# ---- how long


def test_finished_runs_say_how_long_the_others_take(tmp_path: Path) -> None:
    found = outcomes(PLAN.runs, tmp_path)
    assert time_left(found, 7, 2) == "7 runs to make, 2 at a time; how long is known when the first has ended"
    write_run(PLAN.runs[0], tmp_path, 6.0, wall_s=40.0)
    found = outcomes(PLAN.runs, tmp_path)
    assert seconds_left(found, 7, 2) == 160.0
    assert time_left(found, 7, 2) == "7 runs to make, 2 at a time: about 2m40s"
    assert time_left(found, 0, 2) == "nothing left to run"


# ---- while they run


def test_the_table_has_a_row_for_each_arm_and_a_cell_for_each_seed(tmp_path: Path) -> None:
    console, said = text_console(terminal=True)
    names = list(RUNS)
    write_run(RUNS[names[0]], tmp_path, 6.125)
    series = series_in(tmp_path)
    series.running[names[1]] = PretendedChild(Pretender(tmp_path, RUNS), RUNS[names[1]], 5)
    series.failed[names[2]] = "ended with exit code 1: no luck"
    progress = Progress(PLAN, 1, console)
    assert progress.live is not None
    with progress.live:
        progress(series)
    text = said()
    for words in (
        "seed 0",
        "seed 1",
        "6.1250",
        "step 0",
        "failed",
        "·",
        "with-softcap-15",
        "6 runs to make, 1 at a time: about 3m00s",
    ):
        assert words in text


def test_without_a_terminal_every_run_is_a_line_and_old_ones_are_no_news(tmp_path: Path) -> None:
    console, said = text_console(terminal=False)
    names = list(RUNS)
    write_run(RUNS[names[0]], tmp_path, 6.125)
    progress = Progress(PLAN, 1, console)
    progress(series_in(tmp_path))
    write_run(RUNS[names[1]], tmp_path, 6.25)
    series = series_in(tmp_path)
    series.failed[names[2]] = "ended with exit code 1: no luck"
    progress(series)
    progress(series)
    first, second = said().splitlines()
    assert first.startswith(f"{names[1]}: 6.2500; 5 runs to make")
    assert second.startswith(f"{names[2]}: ended with exit code 1: no luck; ")


# ---- what came out


def test_what_has_no_measurable_effect_is_said_and_bars_point_both_ways(tmp_path: Path) -> None:
    jitter = {0: 0.001, 1: -0.001}
    losses = {"full": 6.0, "base": 6.1, "without-softcap-15": 6.2, "with-softcap-15": 5.9}
    write_all(PLAN, tmp_path, lambda run: losses[run.arm] + (jitter[run.seed] if "softcap" in run.arm else 0))
    console, said = text_console(terminal=False)
    show_ablation(conclude(PLAN, outcomes(PLAN.runs, tmp_path), {}), console)
    text = " ".join(said().split())
    assert "-0.2000 [-0.2127, -0.1873]" in text
    assert "softcap-15 -0.2000 ------------------------------" in text
    assert "interaction and what was not run +0.1000 +++++++++++++++ " in text
    assert "No measurable effect" not in text
    assert "Indicative only (scale 1/16, CPU): it settles nothing about the full size." in text


def test_what_is_left_with_one_seed_is_not_called_without_effect(tmp_path: Path) -> None:
    for run in PLAN.runs:
        if run.seed == PLAN.seeds[0]:
            write_run(run, tmp_path, 6.0)
    console, said = text_console(terminal=False)
    show_ablation(conclude(PLAN, outcomes(PLAN.runs, tmp_path), {}), console)
    text = " ".join(said().split())
    assert "One seed, so no interval and no test: softcap-15 (leave-one-out), softcap-15 (add-one-in)." in text
    assert "No measurable effect" not in text
