"""A run with trackers has the bits of one without, whatever they do."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from metrics.test_trackers import Library, events
from paceline.checkpoint.run_folder import RunFolder
from paceline.metrics.metrics_file import read_metrics
from paceline.settings.run import MetricsConfig
from paceline.train.run import resume_run
from train.tiny import losses, run, tiny_config


def test_a_run_is_the_same_with_trackers_that_work_and_with_one_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", Library(fails_at="init"))
    plain = tiny_config(tmp_path / "data", steps=4)
    assert run(plain, tmp_path / "plain").exit_code == 0
    watched = replace(plain, metrics=MetricsConfig(tensorboard=True, wandb="speed"))
    assert run(watched, tmp_path / "watched").exit_code == 0
    assert losses(tmp_path / "watched") == losses(tmp_path / "plain")
    assert [step for step, _ in events(tmp_path / "watched")["train/loss"]] == [1, 2, 3, 4]
    assert capsys.readouterr().err.count("wandb failed") == 1
    norms = [norm for _, norm in events(tmp_path / "watched")["train/gradient_norm"]]
    measured = replace(plain, metrics=MetricsConfig(diagnostics=True))
    run(measured, tmp_path / "measured")
    expected = [record.extra["gradient_norm"] for record in read_metrics(tmp_path / "measured")[0]]
    assert norms == pytest.approx(expected, rel=1e-6)
    assert all("gradient_norm" not in record.extra for record in read_metrics(tmp_path / "plain")[0])


def test_a_resumed_run_goes_on_in_its_event_files(tmp_path: Path) -> None:
    whole = replace(tiny_config(tmp_path / "data", steps=4), metrics=MetricsConfig(tensorboard=True))
    run(replace(whole, train=replace(whole.train, stop_after=2)), tmp_path / "run")
    resume_run(whole, RunFolder(tmp_path / "run"))
    written = [loss for _, loss in events(tmp_path / "run")["train/loss"]]
    assert written == pytest.approx(losses(tmp_path / "run"), rel=1e-6)  # TensorBoard keeps fp32
