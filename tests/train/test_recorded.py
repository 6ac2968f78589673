"""When a micro-batch becomes a CUDA graph. That it changes nothing is tested on a GPU, in test_run_gpu.py."""

from dataclasses import replace
from pathlib import Path

import pytest

from paceline.train.config import RunConfig
from paceline.train.recorded import recordable
from train.tiny import narrow_record

HERE = {"device": "cuda", "world": 1, "window_on_host": False}


@pytest.fixture
def compiled(tmp_path: Path) -> RunConfig:
    config = narrow_record("r18-softcap", tmp_path / "data", steps=8)
    return replace(config, train=replace(config.train, compile=True))


def test_a_gradient_is_recorded_where_one_gpu_launches_compiled_code(compiled: RunConfig) -> None:
    assert recordable(compiled, **HERE) is None
    off = replace(compiled, train=replace(compiled.train, cuda_graph=False))
    assert recordable(off, **HERE) == "--train.no-cuda-graph"


@pytest.mark.parametrize(
    ("changed", "why"), [({"device": "cpu"}, "cpu"), ({"world": 2}, "2 ranks"), ({"window_on_host": True}, "window")]
)
def test_and_nowhere_else(compiled: RunConfig, changed: dict[str, object], why: str) -> None:
    assert why in (recordable(compiled, **(HERE | changed)) or "")  # type: ignore[arg-type]


def test_what_must_see_each_micro_batch_or_is_not_compiled_is_left_alone(compiled: RunConfig) -> None:
    plain = replace(compiled, train=replace(compiled.train, compile=False))
    watched = replace(compiled, metrics=replace(compiled.metrics, instruments=True))
    assert "compiled" in (recordable(plain, **HERE) or "")
    assert "instruments" in (recordable(watched, **HERE) or "")
    short = replace(compiled, train=replace(compiled.train, recompute=True))
    assert "memory is short" in (recordable(short, **HERE) or "")
