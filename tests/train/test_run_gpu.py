"""What a GPU might do otherwise, on one. The CPU twins are in test_deterministic.py, test_cuda_graph.py,
test_recompute.py, test_diagnostics.py, test_bad_steps.py, test_run.py and checkpoint/test_saver.py."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.checkpoint import store
from paceline.checkpoint.run_folder import RunFolder
from paceline.checkpoint.save import Saver
from paceline.lab.bench.steps import Steps
from paceline.metrics.metrics_file import read_metrics
from paceline.parallel.machine import inspect_machine
from paceline.settings.data import BatchConfig
from paceline.settings.run import RunConfig
from paceline.train import gradient_step
from paceline.train.gradient_step import accumulate_gradient
from paceline.train.run import resume_run
from train.tiny import losses, narrow_record, run, weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def on_gpu(folder: Path, *, compiled: bool, steps: int = 8) -> RunConfig:
    config = narrow_record("r18-softcap", folder / "data", steps=steps)
    return replace(config, train=replace(config.train, device="cuda", compile=compiled))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_deterministic_run_repeats_to_the_last_bit(compiled: bool, tmp_path: Path) -> None:
    config = on_gpu(tmp_path, compiled=compiled)
    for name in ("a", "b"):
        run(replace(config, train=replace(config.train, deterministic=True)), tmp_path / name)
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    one, other = weights(tmp_path / "a"), weights(tmp_path / "b")
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_replayed_micro_batch_is_the_launched_one(tmp_path: Path) -> None:
    config = on_gpu(tmp_path, compiled=True)
    wide = replace(config, model=replace(config.model, width=768, head_dim=128))
    for name, graph in (("launched", False), ("replayed", True)):
        run(replace(wide, train=replace(wide.train, cuda_graph=graph, deterministic=True)), tmp_path / name)
    assert losses(tmp_path / "launched") == losses(tmp_path / "replayed")


@pytest.mark.parametrize("compiled", [False, True])
def test_a_stopped_and_resumed_deterministic_run_is_the_uninterrupted_one(compiled: bool, tmp_path: Path) -> None:
    config = on_gpu(tmp_path, compiled=compiled)
    config = replace(config, train=replace(config.train, deterministic=True))
    run(config, tmp_path / "whole")
    run(replace(config, train=replace(config.train, stop_after=5)), tmp_path / "cut")
    resume_run(config, RunFolder(tmp_path / "cut"))
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    one, other = weights(tmp_path / "cut"), weights(tmp_path / "whole")
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_what_is_saved_is_the_state_of_the_moment(tmp_path: Path) -> None:
    """The copies leave the device while later work is queued behind them."""
    state = torch.zeros(64 << 20, device="cuda")
    with Saver(RunFolder(tmp_path), keep=2) as saver:
        for step in (1, 2):
            state.fill_(step)
            saver.save(store.Checkpoint(step, {"model": {"w": state}, "optimizer": {"s": state[:5]}}, state={}))
            state.fill_(-1)
    for step in (1, 2):
        saved = store.load(RunFolder(tmp_path).checkpoint(step))
        assert set(saved.model["w"].unique().tolist()) == set(saved.groups["optimizer"]["s"].tolist()) == {step}


def test_a_bad_step_is_skipped_where_it_is_found(tmp_path: Path) -> None:
    config = on_gpu(tmp_path, compiled=False, steps=4)
    calls = iter(range(10))

    def gradient(*given: Any, **options: Any) -> Tensor:
        return accumulate_gradient(*given, **options) * (math.nan if next(calls) == 2 else 1.0)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(gradient_step, "accumulate_gradient", gradient)
        done = run(config, tmp_path / "run")
    assert done.card.skipped_steps == 1
    assert [loss is None for loss in losses(tmp_path / "run")] == [False, False, True, False]
    assert all(weight.isfinite().all() for weight in weights(tmp_path / "run").values())


@pytest.mark.parametrize("compiled", [False, True])
def test_recomputing_needs_less_memory(compiled: bool, tmp_path: Path) -> None:
    """With enough tokens for activations to outweigh the optimizer."""
    config = on_gpu(tmp_path, compiled=compiled, steps=2)
    wide = replace(config.model, width=768, head_dim=128)
    config = replace(
        config,
        batch=BatchConfig(tokens=8_192, sequence_tokens=1_024),
        evaluate=replace(config.evaluate, tokens=1_024),
    )
    peaks = {}
    for recompute in (False, True):
        torch.cuda.reset_peak_memory_stats()
        given = replace(config, model=wide, train=replace(config.train, recompute=recompute))
        peaks[recompute] = run(given, tmp_path / str(recompute)).card.peak_bytes
    assert losses(tmp_path / "True") == pytest.approx(losses(tmp_path / "False"), rel=1e-2)
    assert peaks[True] < peaks[False]


def test_diagnostics_record_the_memory(tmp_path: Path) -> None:
    config = on_gpu(tmp_path, compiled=False)
    run(replace(config, metrics=replace(config.metrics, diagnostics=True)), tmp_path / "run")
    for record in read_metrics(tmp_path / "run")[0]:
        assert 0 < record.extra["allocated_bytes"] <= record.extra["reserved_bytes"]
        assert record.extra["largest_score"] > 0


@pytest.mark.parametrize("compiled", [False, True])
def test_a_step_never_waits_for_the_device(compiled: bool, tmp_path: Path) -> None:
    """At the width of real heads, so that our kernels take part; a first step may wait, for compilation and tuning."""
    config = on_gpu(tmp_path, compiled=compiled)
    wide = replace(config, model=replace(config.model, width=768, head_dim=128))
    ready = Steps(*inspect_machine(wide))
    ready.warm_up()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(wide.steps):  # through all windows
            ready._take(step)
    finally:
        torch.cuda.set_sync_debug_mode("default")
