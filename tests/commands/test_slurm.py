"""`--launch slurm`: what is told before a job is handed in, and a job of two ranks by submitit's local executor."""

import shutil
import sys
from pathlib import Path

import pytest

from paceline.cli import main
from paceline.commands.slurm import submit
from paceline.metrics.card import read_card
from paceline.settings.parallel import SlurmConfig
from parallel.launch import flags


def test_without_submitit_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "submitit", None)
    assert main(["train", "demo", "--launch", "slurm"]) == 2
    assert capsys.readouterr().err == "paceline: --launch slurm needs submitit: pip install 'paceline[slurm]'\n"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--slurm.nodes", "0"], "--slurm.nodes 0 must be at least 1"),
        (["--slurm.nodes", "3"], "cannot be shared equally by 3 ranks"),
        (["--batch.tokens", "-1"], "--batch.tokens"),  # a setting of the run, found before it waits in a queue
    ],
)
def test_a_mistake_is_told_before_the_job_is_handed_in(
    words: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "demo", "--launch", "slurm", *words]) == 2
    assert line in capsys.readouterr().err


@pytest.mark.slow
def test_the_tasks_of_a_job_train_together(tmp_path: Path) -> None:
    """Two ranks, one for each of two GPUs, which these CPU ranks leave alone; and a mistake fails the job."""
    submitit = pytest.importorskip("submitit", reason="needs paceline[slurm]")
    words = [
        "demo",
        "--launch",
        "slurm",
        "--steps",
        "5",
        "--no-finish",
        "--out",
        str(tmp_path / "run"),
        *flags(tmp_path),
    ]
    config = SlurmConfig(cluster="local", gpus=2, minutes=2, logs=str(tmp_path / "logs"))
    job = submit(words, config, name="demo")
    assert job.results() == [None, None], job.stderr()
    card = read_card(tmp_path / "run")
    assert (card.finished, card.ranks) == (True, 2)
    again = submit(words, config, name="demo")
    with pytest.raises(submitit.core.utils.FailedJobError, match="ended with exit code 2"):
        again.results()
    said = "".join(path.read_text() for path in (tmp_path / "logs").glob(f"{again.job_id}_*_log.err"))
    assert said.count("paceline: --out") == 1


def test_a_machine_without_slurm_is_told_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("submitit")
    if shutil.which("srun"):
        pytest.skip("this machine has Slurm")
    assert main(["train", "demo", "--launch", "slurm"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("paceline: --launch slurm cannot be used here: ")
    assert told.count("\n") == 1
