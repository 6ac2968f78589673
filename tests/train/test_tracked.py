"""A run with trackers has the bits of one without, whatever they do."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from metrics.test_trackers import Library, events
from paceline.metrics.config import MetricsConfig
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
