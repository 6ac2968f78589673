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
