"""When a micro-batch becomes a CUDA graph. That it changes nothing is tested on a GPU, in test_run_gpu.py."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from paceline.data.feed import DeviceBatch
from paceline.settings.run import RunConfig
from paceline.train import cuda_graph
from paceline.train.cuda_graph import EAGER_STEPS, CapturedGradients, why_not_captured
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


def test_so_is_one_with_tables_that_have_row_gradients_which_get_no_dense_one(
    compiled: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    ngrams = replace(compiled.model.ngrams, bigram_rows=64)
    config = replace(compiled, model=replace(compiled.model, ngrams=ngrams))
    assert why_not_captured(config, **HERE) is None
    model, given = nn.ModuleDict({"head": nn.Linear(2, 2, bias=False), "ngrams": nn.Embedding(4, 2)}), list[object]()
    monkeypatch.setattr(cuda_graph, "has_room", lambda limit_gib: True)
    monkeypatch.setattr(cuda_graph, "CapturedGradient", lambda model, parameters, *rest: given.extend(parameters))
    run = SimpleNamespace(config=config, model=model, row_gradients={"ngrams.weight": None})
    graphs = CapturedGradients(run, model, torch.zeros(1), torch.zeros(0))
    batch = DeviceBatch(torch.zeros(2, 8), torch.zeros(2, 8))
    for _ in range(EAGER_STEPS + 1):
        graphs.of(batch, 1)
    assert len(given) == 1
    assert given[0] is model["head"].weight


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
