"""Through the command line: a run killed at any moment and resumed is, bit for bit, the run that was left in peace."""

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.checkpoint.run_folder import RunFolder
from paceline.cli import main
from paceline.metrics.card import read_card
from paceline.metrics.metrics_file import read_metrics
from train.killing import (
    STEPS_PER_SHARD,
    Moment,
    as_a_command,
    assert_same,
    by_torchrun,
    in_a_fork,
    left_by,
    started,
    train,
)
from train.soaking import note_result
from train.victim import PLACES, struck

STEPS = 2 * STEPS_PER_SHARD + 2
NEVER = Moment("gradient", 10**9)
ENDS_S = 30.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kills")


@pytest.fixture(scope="module")
def whole(folder: Path) -> dict[str, Any]:
    """What the run leaves if nobody disturbs it."""
    assert main(train(folder, "whole", STEPS)) == 0
    found = left_by(folder / "whole")
    assert [step for step, *_ in found["steps"]] == list(range(1, STEPS + 1))
    assert len({window for *_, window in found["steps"]}) >= 4, "windows change"
    return found


def test_killed_at_a_shard_edge_in_a_validation_and_in_a_save(folder: Path, whole: dict[str, Any]) -> None:
    """And in the middle of an update."""
    moments = [
        Moment("update", 4),  # before the first checkpoint: the run begins anew
        Moment("gradient", STEPS_PER_SHARD + 1),
        Moment("saving", 3),
        Moment("evaluation", 2),
    ]
    for moment in moments:
        assert in_a_fork(moment, signal.SIGKILL, train(folder, "killed", STEPS)) == -signal.SIGKILL, moment
        assert not read_card(folder / "killed").finished
    assert main(train(folder, "killed", STEPS)) == 0
    assert_same(left_by(folder / "killed"), whole)


@pytest.mark.parametrize(
    ("place", "call"),
    [
        ("gradient", 1),
        ("validated", 1),
        ("saving", 2),
        ("update", 3),
        pytest.param("gradient", 9, marks=pytest.mark.slow),
        pytest.param("card", 1, marks=pytest.mark.slow),
    ],
)
def test_sigterm_ends_soon_with_a_checkpoint_and_costs_nothing(
    place: str, call: int, folder: Path, whole: dict[str, Any]
) -> None:
    """In warm-up, in training, in a validation, in a save."""
    run = folder / f"asked-{place}-{call}"
    with struck(place, call, signal.SIGTERM):
        began = time.monotonic()
        assert main(train(folder, run.name, STEPS)) == 128 + signal.SIGTERM
    assert time.monotonic() - began < ENDS_S
    card = read_card(run)
    assert RunFolder(run).checkpoints()[-1].name == f"step_{card.steps_done:06d}"
    assert card.steps_done < STEPS
    assert len(read_metrics(run)[0]) == card.steps_done
    assert main(train(folder, run.name, STEPS)) == 0
    assert_same(left_by(run), whole)


def test_a_run_in_progress_is_left_alone_and_goes_on_once_it_was_killed(
    folder: Path, whole: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    run = folder / "busy"
    begin = train(folder, run.name, STEPS)
    process = started(Moment("gradient", STEPS_PER_SHARD), signal.SIGSTOP, begin)
    try:
        assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])
        before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
        for words in (begin, train(folder, run.name, STEPS)):
            assert main(words) == 2
            said = capsys.readouterr().err
            assert "another process trains this run" in said
            assert said.count("\n") == 1
        assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    finally:
        process.kill()
        process.communicate()
    assert main(train(folder, run.name, STEPS)) == 0
    assert_same(left_by(run), whole)


# ---- the whole series

KILLS = 30
LONG = 40 * STEPS_PER_SHARD
"""Steps, enough for thirty launches of a few steps each."""
LAUNCHES: dict[int, Callable[[Moment, int, list[str]], int]] = {1: as_a_command, 2: by_torchrun}


def random_moments(seed: int) -> list[Moment]:
    """Each place several times; counted so that a launch makes some progress before."""
    generator = random.Random(seed)
    places = [*PLACES] * (KILLS // len(PLACES) + 1)
    generator.shuffle(places)
    rare = {"evaluation": 2, "validated": 3, "publishing": 2, "pruning": 2, "card": 2, "saving": 8}
    return [Moment(place, generator.randint(1, rare.get(place, 14))) for place in places[:KILLS]]


@pytest.fixture(scope="module", params=[1, 2])
def undisturbed(request: pytest.FixtureRequest, folder: Path) -> tuple[int, dict[str, Any]]:
    """The number of ranks, and what a long run of so many leaves."""
    world: int = request.param
    assert LAUNCHES[world](NEVER, signal.SIGKILL, train(folder, f"long-{world}", LONG)) == 0
    return world, left_by(folder / f"long-{world}")


@pytest.mark.soak
@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM"])
def test_struck_thirty_times_and_still_the_same_run(
    name: str, undisturbed: tuple[int, dict[str, Any]], folder: Path
) -> None:
    world, expected = undisturbed
    launch, number, run = LAUNCHES[world], signal.Signals[name], folder / f"struck-{name}-{world}"
    began, struck_at = time.monotonic(), Counter[str]()
    for moment in random_moments(seed=world):
        if (run / "card.json").exists() and read_card(run).finished:
            break
        if launch(moment, number, train(folder, run.name, LONG)) != 0:
            struck_at[moment.place] += 1
    if not read_card(run).finished:
        assert launch(NEVER, number, train(folder, run.name, LONG)) == 0
    assert_same(left_by(run), expected)
    note_result(f"{name}, {world} ranks", struck=sum(struck_at.values()), places=struck_at, began=began)
    assert sum(struck_at.values()) >= KILLS - 2
