"""Compiled code inside the gradients' wrapper: the same run."""

from pathlib import Path

import pytest

from paceline.cli import main
from parallel.launch import flags, torchrun
from train.tiny import losses


@pytest.mark.slow
def test_two_compiled_ranks_train_as_one_plain_process(tmp_path: Path) -> None:
    """Also the Newton-Schulz iteration is compiled, for shares of different sizes."""
    words = ["train", "demo", "--steps", "7", "--no-finish", *flags(tmp_path)]
    launcher = torchrun(2, "paceline.cli", *words, "--train.compile", "--train.skip-guards", "--out", tmp_path / "two")
    said, _ = launcher.communicate(timeout=600)
    assert launcher.returncode == 0, said
    assert main([*words, "--out", str(tmp_path / "one")]) == 0
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=5e-4)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_blocks_compiled_one_by_one_under_fsdp_train_as_one_plain_process(world: int, tmp_path: Path) -> None:
    words = ["train", "demo", "--steps", "7", "--no-finish", *flags(tmp_path)]
    sharded = [*words, "--train.compile", "--parallel.fsdp", "--out", tmp_path / "sharded"]
    launcher = torchrun(world, "paceline.cli", *sharded)
    said, _ = launcher.communicate(timeout=900)
    assert launcher.returncode == 0, said
    assert "not compiled" not in said
    assert main([*words, "--out", str(tmp_path / "one")]) == 0
    assert losses(tmp_path / "sharded") == pytest.approx(losses(tmp_path / "one"), rel=5e-4)
