"""When a micro-batch becomes a CUDA graph. That it changes nothing is tested on a GPU, in test_run_gpu.py."""

from dataclasses import replace
from pathlib import Path

import pytest

from paceline.settings.run import RunConfig
from paceline.train.cuda_graph import why_not_captured
from train.tiny import narrow_record

HERE = {"device": "cuda", "world": 1, "windows_on_host": False}


@pytest.fixture
def compiled(tmp_path: Path) -> RunConfig:
    config = narrow_record("r18-softcap", tmp_path / "data", steps=8)
    return replace(config, train=replace(config.train, compile=True))


def test_a_gradient_is_captured_where_one_gpu_launches_compiled_code(compiled: RunConfig) -> None:
    assert why_not_captured(compiled, **HERE) is None
    off = replace(compiled, train=replace(compiled.train, cuda_graph=False))
    assert why_not_captured(off, **HERE) == "--train.no-cuda-graph"


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"device": "cpu"}, "cpu"),
        ({"world": 2}, "2 ranks"),
        ({"windows_on_host": True}, "window"),
    ],
)
def test_and_nowhere_else(compiled: RunConfig, changed: dict[str, object], why: str) -> None:
    assert why in (why_not_captured(compiled, **(HERE | changed)) or "")  # type: ignore[arg-type]


def test_what_must_see_each_micro_batch_or_is_not_compiled_is_left_alone(compiled: RunConfig) -> None:
    plain = replace(compiled, train=replace(compiled.train, compile=False))
    watched = replace(compiled, metrics=replace(compiled.metrics, diagnostics=True))
    assert "compiled" in (why_not_captured(plain, **HERE) or "")
    assert "diagnostics" in (why_not_captured(watched, **HERE) or "")
    short = replace(compiled, train=replace(compiled.train, recompute=True))
    assert "memory is short" in (why_not_captured(short, **HERE) or "")
