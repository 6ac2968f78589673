"""`train.deterministic` asks torch and cuBLAS for repeatable operations; on a CPU all of them are already."""

import os
from dataclasses import replace
from pathlib import Path

import torch

from train.tiny import losses, run, tiny_config, weights


def test_on_a_cpu_it_changes_nothing(tmp_path: Path) -> None:
    """Nor do the NaNs with which torch then fills memory that nobody has written yet."""
    config = tiny_config(tmp_path / "data", steps=6)
    run(config, tmp_path / "plain")
    assert not torch.are_deterministic_algorithms_enabled()
    run(replace(config, train=replace(config.train, deterministic=True)), tmp_path / "deterministic")
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert losses(tmp_path / "plain") == losses(tmp_path / "deterministic")
    one, other = weights(tmp_path / "plain"), weights(tmp_path / "deterministic")
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_cublas_gets_its_workspaces_unless_the_user_chose_them(tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "data", steps=1)
    run(config, tmp_path / "a")
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    deterministic = replace(config, train=replace(config.train, deterministic=True))
    run(deterministic, tmp_path / "b")
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"
    run(deterministic, tmp_path / "c")
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
