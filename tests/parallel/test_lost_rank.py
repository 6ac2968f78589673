"""Through the command line and torchrun: a rank that dies takes the others with it, soon, and the run goes on later."""

import os
import signal
import time
from pathlib import Path

import pytest

from paceline.checkpoint.run_folder import RunFolder, only_writer
from paceline.cli import main
from paceline.metrics.card import read_card
from paceline.metrics.metrics_file import read_metrics
from parallel.launch import child_of, flags, torchrun, wait_for_checkpoint

ENDS_S = 60
"""Far below the half hour that ranks would wait for each other, far above what a busy machine needs."""


@pytest.mark.journey
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds the rank in /proc")
def test_a_rank_that_is_killed_ends_the_run_and_another_launch_finishes_it(tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = ["train", "demo", "--steps", "400", "--out", str(run), "--no-finish", *flags(tmp_path)]
    launcher = torchrun(2, "paceline.cli", *command)
    wait_for_checkpoint(run, launcher)
    os.kill(child_of(launcher, rank=1), signal.SIGKILL)
    said, _ = launcher.communicate(timeout=ENDS_S)
    assert launcher.returncode != 0
    assert not read_card(run).finished
    assert main(["train", "--resume", str(run), "--train.stop-after", "2", "--no-finish"]) == 0, said
    card = read_card(run)
    assert card.ranks == 1  # as many as there are: the step is the same
    assert [record.step for record in read_metrics(run)[0]] == list(range(1, card.steps_done + 1))


@pytest.mark.slow
def test_two_ranks_killed_and_resumed_make_the_uninterrupted_run(tmp_path: Path) -> None:
    lines = {}
    for name in ("whole", "cut"):
        run = tmp_path / name
        command = ["train", "demo", "--steps", "60", "--out", run, "--no-finish", *flags(tmp_path)]
        launcher = torchrun(2, "paceline.cli", *command)
        if name == "cut":
            wait_for_checkpoint(run, launcher)
            os.kill(child_of(launcher, rank=1), signal.SIGKILL)
            launcher.communicate(timeout=ENDS_S)
            assert not read_card(run).finished
            launcher = torchrun(2, "paceline.cli", "train", "--resume", run, "--no-finish")
        said, _ = launcher.communicate(timeout=ENDS_S)
        assert launcher.returncode == 0, said
        lines[name] = [record.train_loss for record in read_metrics(run)[0]]
    assert lines["cut"] == lines["whole"]


@pytest.mark.slow
def test_ctrl_c_on_torchrun_leaves_a_checkpoint_of_the_step_that_the_card_names(tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = ["train", "demo", "--steps", "100000", "--out", run, "--no-finish", *flags(tmp_path)]
    launcher = torchrun(2, "paceline.cli", *command)
    wait_for_checkpoint(run, launcher)
    launcher.send_signal(signal.SIGINT)
    said, _ = launcher.communicate(timeout=ENDS_S)
    card = read_card(run)
    assert not card.finished, said
    assert RunFolder(run).checkpoints()[-1].name == f"step_{card.steps_done:06d}"


@pytest.mark.slow
def test_a_mistake_is_told_in_one_line_before_ranks_meet(tmp_path: Path) -> None:
    launcher = torchrun(3, "paceline.cli", "train", "demo", "--out", tmp_path / "run", *flags(tmp_path))
    said, _ = launcher.communicate(timeout=ENDS_S)
    assert launcher.returncode != 0
    line = "paceline: --batch.tokens 512: 4 sequences of 128 tokens cannot be shared equally by 3 ranks"
    assert said.count("paceline: ") == said.count(line) == 1


@pytest.mark.slow
def test_a_mistake_that_is_found_when_ranks_have_met_is_told_once(tmp_path: Path) -> None:
    mistake = ["--data.dir", tmp_path / "nowhere"]
    launcher = torchrun(2, "paceline.cli", "train", "demo", "--out", tmp_path / "run", *flags(tmp_path), *mistake)
    said, _ = launcher.communicate(timeout=ENDS_S)
    assert launcher.returncode != 0
    assert said.count("paceline: ") == said.count("nowhere: not a folder") == 1


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_a_restarted_launch_goes_on_by_itself_and_makes_the_uninterrupted_run(killed: int, tmp_path: Path) -> None:
    lines = {}
    for name in ("whole", "cut"):
        run = tmp_path / name
        command = ["train", "demo", "--steps", "60", "--out", run, "--no-finish", *flags(tmp_path)]
        launcher = torchrun(2, "paceline.cli", *command, restarts=2)
        if name == "cut":
            wait_for_checkpoint(run, launcher)
            os.kill(child_of(launcher, rank=killed), signal.SIGKILL)
        said, _ = launcher.communicate(timeout=ENDS_S)
        assert launcher.returncode == 0, said
        lines[name] = [record.train_loss for record in read_metrics(run)[0]]
    card = read_card(tmp_path / "cut")
    assert any(note.startswith("resumed from step_") for note in card.notes)
    assert card.finished
    assert len(lines["whole"]) == 60
    assert lines["cut"] == lines["whole"]


@pytest.mark.slow
def test_a_restart_before_the_first_checkpoint_begins_anew_in_the_same_folder(tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = ["train", "demo", "--steps", "60", "--out", run, "--no-finish", *flags(tmp_path)]
    launcher = torchrun(2, "paceline.cli", *command, "--checkpoint.every", "None", restarts=1)
    while not (run / "metrics.jsonl").exists():
        time.sleep(0.05)
    os.kill(child_of(launcher, rank=1), signal.SIGKILL)
    said, _ = launcher.communicate(timeout=ENDS_S)
    assert launcher.returncode == 0, said
    assert [record.step for record in read_metrics(run)[0]] == list(range(1, 61))


@pytest.mark.slow
def test_a_restart_never_goes_on_with_a_run_of_another_launch(tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = ["train", "demo", "--steps", "3", "--out", str(run), "--no-finish", *flags(tmp_path)]
    assert main(command) == 0
    before = (run / "card.json").read_bytes()
    launcher = torchrun(2, "paceline.cli", *command, restarts=1)
    said, _ = launcher.communicate(timeout=ENDS_S)
    assert launcher.returncode != 0
    assert "holds a run already" in said
    assert (run / "card.json").read_bytes() == before


@pytest.mark.slow
def test_ranks_that_come_to_a_run_in_progress_are_refused_once(tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = ["train", "demo", "--steps", "3", "--out", str(run), "--no-finish", *flags(tmp_path)]
    assert main([*command, "--train.stop-after", "1"]) == 0
    with only_writer(run):
        launcher = torchrun(2, "paceline.cli", "train", "--resume", run)
        said, _ = launcher.communicate(timeout=ENDS_S)
    assert launcher.returncode != 0
    assert said.count("paceline: ") == said.count("another process trains this run") == 1
