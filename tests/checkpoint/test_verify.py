"""`paceline verify`: of a run, a checkpoint and data, every damaged file is named and the exit code says so."""

import json
import shutil
from pathlib import Path

import pytest

from paceline.cli import main
from train import frozen
from train.tiny import write_text_shards

STEP = "checkpoints/step_000003"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return Path(shutil.copytree(frozen.FOLDER / "format-2", tmp_path / "run"))


def verified(path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = main(["verify", str(path)])
    return code, capsys.readouterr().out


def test_a_run_that_is_whole(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verified(run, capsys) == (0, f"{run}: 10 files, ok (3 without a hash were only read)\n")
    assert verified(run / STEP, capsys) == (0, f"{run / STEP}: 7 files, ok\n")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (f"{STEP}/model-00001.safetensors", "does not match its hash"),
        (f"{STEP}/state.json", "does not match its hash"),
        (f"{STEP}/manifest.json", "manifest.json: "),
        ("config.json", "not valid JSON"),
        ("card.json", "card.json: "),
        ("metrics.jsonl", "line 1: not a record"),
    ],
)
def test_a_flipped_bit_is_named(name: str, said: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = bytearray((run / name).read_bytes())
    data[8] ^= 0x80
    (run / name).write_bytes(data)
    code, out = verified(run, capsys)
    assert code == 1
    assert out.startswith(f"{name}: ") or name == "metrics.jsonl"
    assert said in out
    assert "1 damaged or missing" in out


def test_a_run_whose_manifest_states_no_sizes_is_checked_against_the_headers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Format 1. One byte more than the header of a file of tensors accounts for is found without hashing it."""
    old = Path(shutil.copytree(frozen.FOLDER / "format-1", tmp_path / "old"))
    assert verified(old / STEP, capsys) == (0, f"{old / STEP}: 4 files, ok\n")
    with open(old / STEP / "model.safetensors", "ab") as file:
        file.write(b"\0")
    code, out = verified(old / STEP, capsys)
    assert code == 1
    assert out.startswith("model.safetensors: 32,453 bytes, but it claims 32,452\n")


def test_every_damaged_file_is_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / STEP / "optimizer-00001.safetensors").unlink()
    (run / STEP / "guard-00001.safetensors").write_bytes(b"short")
    code, out = verified(run, capsys)
    assert code == 1
    assert f"{STEP}/optimizer-00001.safetensors: No such file" in out
    assert f"{STEP}/guard-00001.safetensors: 5 bytes instead of 136" in out
    assert main(["verify", str(run), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False


def test_metrics_that_end_before_a_checkpoint_are_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = run / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes()[:-1].rpartition(b"\n")[0] + b"\n")  # whole lines, one less
    code, out = verified(run, capsys)
    assert code == 1
    assert out.startswith(f"metrics.jsonl: holds {metrics.stat().st_size:,} bytes, but step_000003 was saved after")


def test_a_config_of_a_newer_version_is_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps({**config, "flux": 1}))
    code, out = verified(run, capsys)
    assert code == 1
    assert out.startswith("config.json: flux: unknown key")


def test_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_text_shards(tmp_path / "data")
    assert verified(tmp_path / "data", capsys)[0] == 0
    shard = tmp_path / "data" / "x_val_000000.bin"
    shard.write_bytes(shard.read_bytes()[:-2])
    code, out = verified(tmp_path / "data", capsys)
    assert code == 1
    assert out.startswith("x_val_000000.bin: ")


def test_a_manifest_that_lies_about_the_largest_id(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_text_shards(tmp_path / "data")
    manifest = tmp_path / "data" / "x_val_000000.bin.json"
    manifest.write_text(manifest.read_text().replace('"max_token": 256', '"max_token": 1'))
    code, out = verified(tmp_path / "data", capsys)
    assert code == 1
    assert "its largest id is 256, its manifest says 1" in out


def test_what_is_nothing_of_the_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(tmp_path / "nowhere")]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "name a checkpoint or a folder of shards" in said
