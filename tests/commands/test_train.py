"""`paceline train` after its last step: what cannot be written costs itself, not the run."""

from pathlib import Path

import pytest

from paceline.checkpoint.run_folder import RunFolder
from paceline.commands.train import _conclude
from train.tiny import run, tiny_config


def test_a_page_and_a_card_that_cannot_be_written_cost_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("paceline.commands.train.SAMPLE_TOKENS", 3)
    folder = RunFolder(tmp_path / "run")
    done = run(tiny_config(tmp_path / "data", steps=2), folder.path)
    folder.report.mkdir()
    capsys.readouterr()
    _conclude(folder, done, finish=True)
    said = capsys.readouterr().out
    assert f"{folder.path}: finished" in said
    assert f"no report: {folder.report}: cannot be read or written (Is a directory)\n" in said
    card = folder.path / "card.json"
    card.unlink()
    card.mkdir()
    _conclude(folder, done, finish=True)
    said = capsys.readouterr().out
    assert f"the sample is not on the card: {card}: cannot be read or written (Is a directory)\n" in said
    assert f"{folder.path}: finished" in said
