"""On a GPU: the model of memory against the allocator, and a card made small by its limit."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paceline.data.config import BatchConfig, DataConfig
from paceline.evaluate.config import EvaluateConfig
from paceline.recipes.presets import preset
from paceline.recipes.scaling import with_steps
from paceline.train.config import RunConfig, TrainConfig
from paceline.train.ladder import foretold
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


def record(folder: Path, *, fast_paths: bool, limit_gib: float | None = None) -> RunConfig:
    """Record 18 in its full width and depth, uncompiled, on sequences of 2,048 bytes."""
    write_text_shards(folder)
    config = with_steps(preset("r18-softcap"), 2)
    return replace(
        config,
        data=DataConfig(dir=str(folder), tokenizer="bytes", end_of_text=256, order="shuffled"),
        batch=BatchConfig(tokens=16_384, sequence_tokens=2_048),
        train=TrainConfig(device="cuda", fast_paths=fast_paths, memory_limit_gib=limit_gib),
        evaluate=EvaluateConfig(every=None, tokens=2_048),
    )


@pytest.mark.parametrize("fast_paths", [True, False])
def test_the_peak_is_the_foretold_one(fast_paths: bool, tmp_path: Path) -> None:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    done = run(record(tmp_path / "data", fast_paths=fast_paths), tmp_path / "run")
    assert done.parts.fit is not None
    assert done.card.peak_bytes is not None
    expected = foretold(done.parts.config, done.parts.machine.back_ends, done.parts.fit.rung).peak
    assert done.card.peak_bytes - before == pytest.approx(expected, rel=0.15)


def test_a_smaller_card_cuts_the_step_and_keeps_its_losses(tmp_path: Path) -> None:
    run(record(tmp_path / "data", fast_paths=True), tmp_path / "large")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    limit = (torch.cuda.memory_reserved() + 4.5 * GIB) / GIB
    done = run(record(tmp_path / "data", fast_paths=True, limit_gib=limit), tmp_path / "small")
    assert done.parts.config.batch.micro_tokens < 16_384  # type: ignore[operator]
    assert torch.cuda.max_memory_reserved() <= limit * GIB
    assert losses(tmp_path / "small") == pytest.approx(losses(tmp_path / "large"), rel=2e-3)
