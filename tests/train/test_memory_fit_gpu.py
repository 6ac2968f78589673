"""On a GPU: the model of memory against the allocator, and a GPU made small by its limit."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paceline.parallel.memory_fit import plan_of
from paceline.parallel.memory_plans import Planned
from paceline.recipes.presets import preset
from paceline.recipes.scaling import with_steps
from paceline.settings.data import BatchConfig, DataConfig
from paceline.settings.run import EvaluateConfig, RunConfig, TrainConfig
from train.tiny import losses, run, write_text_shards

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
GIB = 2**30


@pytest.fixture(autouse=True)
def _own_cache_and_no_limit_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(tmp_path / "cache"))
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


def record(folder: Path, *, custom_kernels: bool, limit_gib: float | None = None) -> RunConfig:
    """Record 18 in its full width and depth, uncompiled, on sequences of 2,048 bytes."""
    write_text_shards(folder)
    config = with_steps(preset("r18-softcap"), 2)
    return replace(
        config,
        data=DataConfig(dir=str(folder), tokenizer="bytes", end_of_text=256, order="shuffled"),
        batch=BatchConfig(tokens=16_384, sequence_tokens=2_048),
        train=TrainConfig(device="cuda", custom_kernels=custom_kernels, memory_limit_gib=limit_gib),
        evaluate=EvaluateConfig(every=None, tokens=2_048),
    )


@pytest.mark.parametrize("custom_kernels", [True, False])
def test_the_peak_is_the_predicted_one(custom_kernels: bool, tmp_path: Path) -> None:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    done = run(record(tmp_path / "data", custom_kernels=custom_kernels), tmp_path / "run")
    plan = plan_of(done.card.fit)
    assert plan is not None
    assert done.card.peak_bytes is not None
    expected = Planned(config=done.run.config, backends=done.run.machine.backends, world=1).memory(plan).peak
    assert done.card.peak_bytes - before == pytest.approx(expected, rel=0.15)


def test_a_smaller_gpu_cuts_the_step_and_keeps_its_losses(tmp_path: Path) -> None:
    run(record(tmp_path / "data", custom_kernels=True), tmp_path / "large")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    limit = (torch.cuda.memory_reserved() + 4.5 * GIB) / GIB
    done = run(record(tmp_path / "data", custom_kernels=True, limit_gib=limit), tmp_path / "small")
    assert done.run.config.batch.micro_tokens < 16_384  # type: ignore[operator]
    assert torch.cuda.max_memory_reserved() <= limit * GIB
    assert losses(tmp_path / "small") == pytest.approx(losses(tmp_path / "large"), rel=2e-3)
