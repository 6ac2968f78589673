"""Checkpoints of every version are verified, loaded and gone on from, for ever after."""

import json
import shutil
from pathlib import Path

import pytest

from paceline.checkpoint import store
from paceline.checkpoint.manifest import FORMAT
from paceline.checkpoint.run_folder import RunFolder
from paceline.cli import main
from paceline.metrics.card import read_card
from train import frozen
from train.tiny import losses, write_text_shards

FORMATS = sorted(path.name for path in frozen.FOLDER.iterdir())


@pytest.fixture(params=FORMATS)
def run(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_text_shards(frozen.DATA)
    return Path(shutil.copytree(frozen.FOLDER / request.param, "run"))


def test_there_is_one_of_every_format() -> None:
    assert [f"format-{number}" for number in range(1, FORMAT + 1)] == FORMATS
    for name in FORMATS:
        assert sum(path.stat().st_size for path in (frozen.FOLDER / name).rglob("*")) < 200_000


def test_a_frozen_run_goes_on_to_its_end(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(run)]) == 0
    assert main(["train", "--resume", str(run), "--train.stop-after", "None", "--no-finish"]) == 0
    assert "resumed from step_000003" in capsys.readouterr().out
    assert read_card(run).finished
    expected = [float.fromhex(loss) for loss in json.loads((run / "expected.json").read_text())]
    assert losses(run) == pytest.approx(expected, rel=1e-4)  # to the bit where the machine is the same
    newest = RunFolder(run).checkpoints()[-1]
    assert json.loads((newest / "manifest.json").read_text())["format"] == FORMAT
    assert store.load(newest).step == 6
