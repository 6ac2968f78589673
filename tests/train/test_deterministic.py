"""`train.deterministic` asks torch, cuBLAS and the compiler for repeatable operations; a CPU has no others.

Its GPU twin is in test_run_gpu.py."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch._inductor.config as inductor
import torch.nn.functional as F
from torch import Tensor

from model.small import random_tokens, shaken, small, windows
from paceline.core import probe
from paceline.core.errors import ConfigError
from paceline.kernels.embedding import look_up_sorted
from paceline.parallel.machine import choose_backends, set_torch_switches
from paceline.recipes.presets import preset
from train.tiny import losses, run, tiny_config, weights


def test_on_a_cpu_it_changes_nothing(tmp_path: Path) -> None:
    """Nor do the NaNs with which torch then fills memory that nobody has written yet."""
    config = tiny_config(tmp_path / "data", steps=6)
    run(config, tmp_path / "plain")
    assert not torch.are_deterministic_algorithms_enabled()
    done = run(replace(config, train=replace(config.train, deterministic=True)), tmp_path / "deterministic")
    assert done.run.model.embeddings.look_up is F.embedding
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


def test_a_model_with_sorted_sums_has_the_gradients_of_the_plain_one() -> None:
    """What a GPU gets, here."""
    config = replace(small("r18-softcap"), num_layers=4, value_ends=1, layers_without_attention=(2,))
    found: dict[bool, dict[str, Tensor]] = {}
    for sorted_sums in (False, True):
        model = shaken(config)
        if sorted_sums:
            model.embeddings.look_up = look_up_sorted
        tokens = random_tokens(2, 128)
        model(tokens, tokens.roll(-1).long(), windows(128)).main.mean().backward()
        found[sorted_sums] = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert found[True].keys() == found[False].keys()
    for name, expected in found[False].items():  # tables are bf16: summed in fp32 and rounded once, or step by step
        scale = float(expected.float().abs().max())
        torch.testing.assert_close(found[True][name].float(), expected.float(), rtol=0, atol=2**-6 * scale, msg=name)


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_compiler_chooses_nothing_by_timing(deterministic: bool, tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "data")
    train = replace(config.train, compile=True, coordinate_descent=True, deterministic=deterministic)
    with inductor.patch(deterministic=not deterministic, coordinate_descent_tuning=False):
        set_torch_switches(train)
        assert inductor.deterministic is deterministic
        assert inductor.coordinate_descent_tuning is not deterministic


def test_back_ends_that_add_in_changing_order_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    usable = probe.Verdict(name="varlen", usable=True, reason="as if there were a GPU")
    monkeypatch.setattr(probe, "varlen_attention", lambda _: usable)
    config = preset("r13-window-warmup")
    config = replace(config, attention=replace(config.attention, backend="varlen"))
    assert choose_backends(config, "cpu", "bf16")[0].attention.name == "varlen"
    with pytest.raises(ConfigError, match=r"--attention.backend varlen cannot be used: .*--train.deterministic is on"):
        choose_backends(replace(config, train=replace(config.train, deterministic=True)), "cpu", "bf16")
