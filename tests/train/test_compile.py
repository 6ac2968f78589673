"""Compiled, a preset is one graph without breaks for all windows of its schedule, and another for validation."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.utils import counters

from paceline.checkpoint.run_folder import RunFolder
from paceline.metrics.metrics_file import read_metrics
from paceline.model import attention
from paceline.recipes.presets import PRESETS, preset
from paceline.recipes.scaling import scaled, with_steps
from paceline.settings import backends as sizes
from paceline.settings.data import BatchConfig
from paceline.settings.run import RunConfig
from paceline.train.run import resume_run
from train.tiny import losses, narrow_record, run, tiny_config, weights

RECORDS = [name for name in PRESETS if name not in ("demo", "frontier-60")]
STEPS = 16
"""As many as there are windows, and two more."""


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each graph of a model that torch.compile makes from now on, whether it is for training. No kernels are
    generated; the optimizer's compilation is left out."""
    made: list[bool] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        made.append(torch.is_grad_enabled())
        compiled: Callable[..., Any] = lookup_backend("aot_eager")(graph, inputs)
        return compiled

    plain = torch.compile

    def compile_model(target: Any, **options: Any) -> Any:
        return plain(target, backend=backend, **options) if isinstance(target, nn.Module) else target

    monkeypatch.setattr(torch, "compile", compile_model)
    torch._dynamo.reset()
    counters.clear()
    return made


def compiled(config: RunConfig) -> RunConfig:
    return replace(config, train=replace(config.train, compile=True))


def check(config: RunConfig, folder: Path, graphs: list[bool]) -> None:
    run(compiled(config), folder)
    assert sorted(graphs) == [False, True]
    assert not counters["graph_break"]
    window = config.model.window
    seen = {record.window_tokens for record in read_metrics(folder)[0]}
    assert seen == ({None} if window.unit == "none" else {window.tokens_at(step, STEPS) for step in range(STEPS)})
    assert window.unit == "none" or len(seen) > 10


def shallow(config: RunConfig) -> RunConfig:
    """A third of the blocks, and of the time to compile, with every kind of block still there."""
    missing = (2,) if config.model.layers_without_attention else ()
    model = replace(config.model, num_layers=4, value_ends=1, layers_without_attention=missing)
    return replace(config, model=model)


@pytest.mark.parametrize("name", [pytest.param("r05-modern-arch", marks=pytest.mark.slow), "r18-softcap"])
def test_two_shallow_presets_train_as_one_graph(name: str, tmp_path: Path, graphs: list[bool]) -> None:
    config = shallow(narrow_record(name, tmp_path / "data", steps=STEPS))
    check(config, tmp_path / "compiled", graphs)
    run(config, tmp_path / "plain")
    assert losses(tmp_path / "compiled") == pytest.approx(losses(tmp_path / "plain"), rel=1e-2)


def test_a_process_may_make_any_number_of_compiled_runs(tmp_path: Path, graphs: list[bool]) -> None:
    """Each has versions of its own of one function, and dynamo refuses more than its limit of them."""
    config = compiled(tiny_config(tmp_path / "data", steps=1))
    with torch._dynamo.config.patch(recompile_limit=4):
        for heads in (1, 2, 4):  # other shapes, hence other versions
            model = replace(config.model, num_heads=heads, head_dim=config.model.width // heads)
            run(replace(config, model=model), tmp_path / str(heads))
    assert len(graphs) >= 6


@pytest.mark.slow
@pytest.mark.parametrize("name", RECORDS)
def test_every_preset_trains_as_one_graph(name: str, tmp_path: Path, graphs: list[bool]) -> None:
    check(narrow_record(name, tmp_path / "data", steps=STEPS), tmp_path / "run", graphs)


@pytest.mark.slow
@pytest.mark.usefixtures("builtin_text")
def test_a_frontier_preset_is_one_graph_whatever_its_stages(tmp_path: Path, graphs: list[bool]) -> None:
    """And one for validation; batches grow by micro-batches of one size, and the head is not part of the graph."""
    config = compiled(with_steps(scaled(preset("frontier-60"), 1 / 16), STEPS))
    run(replace(config, evaluate=replace(config.evaluate, every=None, tokens=2048)), tmp_path / "run")
    assert sorted(graphs) == [False, True]
    assert not counters["graph_break"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["r14-value-embed", "r18-softcap"])
def test_attention_by_chunks_is_one_graph_too(
    name: str, tmp_path: Path, graphs: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the reference goes at a record's real length: here a sequence is just longer than the widest window."""
    monkeypatch.setattr(sizes, "DENSE_LIMIT_TOKENS", 0)
    monkeypatch.setattr(attention, "attend_triangle", None)  # the other way, which must not be taken
    config = shallow(narrow_record(name, tmp_path / "data", steps=STEPS))
    batch, evaluate = BatchConfig(tokens=2560, sequence_tokens=2560), replace(config.evaluate, tokens=2560)
    check(replace(config, batch=batch, evaluate=evaluate), tmp_path / "run", graphs)


@pytest.mark.slow
def test_a_compiled_run_that_was_stopped_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    """With real kernels; the second launch compiles anew, as another process would."""
    config = compiled(tiny_config(tmp_path / "data", steps=7))
    run(config, tmp_path / "whole")
    torch._dynamo.reset()
    run(replace(config, train=replace(config.train, stop_after=4)), tmp_path / "cut")
    torch._dynamo.reset()
    resume_run(config, RunFolder(tmp_path / "cut"))
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    one, other = weights(tmp_path / "cut"), weights(tmp_path / "whole")
    assert all(torch.equal(one[name], other[name]) for name in one)
