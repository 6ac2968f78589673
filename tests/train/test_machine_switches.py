"""Switches of compiler and allocator do what they say, and none of them changes a number."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor
from torch import Tensor, nn
from torch._dynamo import eval_frame

from model.small import random_tokens, shaken, small, windows
from paceline.data.feed import DeviceBatch
from paceline.model.gpt import GPT
from paceline.model.loss import Losses
from paceline.parallel.machine import set_torch_switches
from paceline.settings.run import EvaluateConfig, RunConfig
from paceline.settings.schedule import Stage, StepSettings
from paceline.train.gradient_step import GUARDED_STEPS, GradientStep
from train.tiny import losses, run, tiny_config, weights

STEPS = GUARDED_STEPS + 3
LEVEL = 1.0
"""Read by `probe`; a guard of its compiled code."""


def probe(x: Tensor) -> Tensor:
    return LEVEL * x


@dataclass
class Watched:
    """What was seen of compilation during a run. Its models are traced as ever, but no kernels are generated."""

    tuned: list[bool] = field(default_factory=list)
    """For each graph, whether the compiler was set to tune."""
    trusted: dict[bool, list[bool]] = field(default_factory=lambda: {True: [], False: []})
    """For each call of the compiled model, whether guards were skipped; under True those that train."""
    probed: list[float] = field(default_factory=list)
    """What `probe` gave beside each call that trains. LEVEL is 1 while guards are checked and 2 from then on."""

    def forget(self) -> None:
        torch._dynamo.reset()
        for seen in (self.tuned, self.probed, *self.trusted.values()):
            seen.clear()


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    seen, plain = Watched(), torch.compile

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        seen.tuned.append(inductor.coordinate_descent_tuning)
        return graph.forward

    compiled_probe = plain(probe, backend="eager")

    def compile_model(target: Any, **options: Any) -> Any:
        if not isinstance(getattr(target, "__self__", target), nn.Module):
            return target  # the optimizer's
        compiled = plain(target, backend=backend, **options)

        def call(*args: Tensor) -> Losses:
            training = torch.is_grad_enabled()
            seen.trusted[training].append(eval_frame._stance.skip_guard_eval_unsafe)
            if training:
                monkeypatch.setattr(f"{__name__}.LEVEL", 1.0 if len(seen.probed) < GUARDED_STEPS else 2.0)
                seen.probed.append(compiled_probe(torch.ones(1)).item())
            result: Losses = compiled(*args)
            return result

        return call

    monkeypatch.setattr(torch, "compile", compile_model)
    torch._dynamo.reset()
    yield seen
    torch._dynamo.reset()


def compiled_config(folder: Path, **switches: bool) -> RunConfig:
    """One call of the model a step."""
    config = tiny_config(folder, steps=STEPS, evaluate=EvaluateConfig(every=4, tokens=1024))
    batch = replace(config.batch, micro_tokens=config.batch.tokens)
    return replace(config, batch=batch, train=replace(config.train, compile=True, **switches))


# ---- coordinate descent


@pytest.mark.parametrize("asked", [False, True])
def test_the_compiler_tunes_only_if_asked_to(asked: bool, tmp_path: Path, watched: Watched) -> None:
    config = compiled_config(tmp_path / "data", coordinate_descent=asked)
    with inductor.patch(coordinate_descent_tuning=not asked):  # as an earlier run of this process may have left it
        run(replace(config, steps=1, evaluate=EvaluateConfig(every=None, tokens=1024)), tmp_path / "run")
    assert watched.tuned == [asked, asked]  # a graph for training, and one for validation


@pytest.mark.parametrize("before", [False, True])
def test_a_run_that_does_not_compile_leaves_the_compiler_alone(before: bool, tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "data")
    with inductor.patch(coordinate_descent_tuning=before):
        set_torch_switches(replace(config.train, coordinate_descent=not before))
        assert inductor.coordinate_descent_tuning is before


def loss_and_gradients(model: GPT, forward: Callable[..., Losses]) -> dict[str, Tensor]:
    tokens = random_tokens(1, 256)
    model.zero_grad()
    loss = forward(tokens, tokens.roll(-1), windows(128)).main
    loss.mean().backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {"loss": loss.detach(), **found}


@pytest.mark.slow
def test_a_tuned_model_is_the_uncompiled_one_up_to_rounding() -> None:
    config = replace(small("r17-sparse-values"), num_layers=4, value_ends=1, layers_without_attention=(1,))
    model = shaken(config)
    expected = loss_and_gradients(model, model)
    with inductor.patch(coordinate_descent_tuning=True):
        torch._dynamo.reset()
        found = loss_and_gradients(model, torch.compile(model, fullgraph=True, dynamic=False))
    assert found.keys() == expected.keys()
    for name, value in expected.items():  # tables are bf16, and compiled chains round once where eager ones do twice
        scale = float(value.float().abs().max())
        torch.testing.assert_close(found[name].float(), value.float(), rtol=0, atol=2**-6 * scale, msg=name)


# ---- skipped guards


def test_after_five_steps_guards_are_skipped_and_no_bit_changes(tmp_path: Path, watched: Watched) -> None:
    run(compiled_config(tmp_path / "data", skip_guards=True), tmp_path / "trusted")
    assert watched.trusted[True] == [False] * 5 + [True] * 3
    assert set(watched.trusted[False]) == {False}, "a validation is always checked"
    assert watched.probed == [1.0] * STEPS, "a guard that would fail is not asked, so the old code runs"
    watched.forget()
    run(compiled_config(tmp_path / "data"), tmp_path / "checked")
    assert watched.trusted[True] == [False] * STEPS
    assert watched.probed == [1.0] * 5 + [2.0] * 3, "the guard fails, and the new code runs"
    assert losses(tmp_path / "trusted") == losses(tmp_path / "checked")
    one, other = weights(tmp_path / "trusted"), weights(tmp_path / "checked")
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_stage_of_other_candidates_is_checked_again_before_it_is_trusted(tmp_path: Path, watched: Watched) -> None:
    """Code of the first stage would leave ids out that the second has."""
    found = {}
    for name, trusted in (("trusted", True), ("checked", False)):
        config = compiled_config(tmp_path / "data", skip_guards=trusted)
        stages = (Stage(share=0.5), Stage(share=0.5, candidates=0))
        config = replace(config, steps=14, model=replace(config.model, candidates=100), stages=stages)
        run(config, tmp_path / name)
        found[name] = losses(tmp_path / name)
        assert watched.trusted[True] == [False] * 2 * GUARDED_STEPS + [trusted] * 14, "both were tried before step 0"
        watched.forget()
    assert found["trusted"] == found["checked"]


# ---- stages


def test_shapes_of_later_stages_are_compiled_before_the_first_step(
    tmp_path: Path, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing else comes of it: losses and weights are those of a run that compiles when a stage begins."""
    graphs, gradient = list[int](), GradientStep.gradient

    def noted(step: GradientStep, settings: StepSettings, batch: DeviceBatch) -> tuple[Tensor, Tensor | None]:
        found = gradient(step, settings, batch)
        graphs.append(len(watched.tuned))
        return found

    monkeypatch.setattr(GradientStep, "gradient", noted)
    config = replace(compiled_config(tmp_path / "data"), steps=6, evaluate=EvaluateConfig(every=None, tokens=1024))
    stages = (Stage(share=0.4, batch_tokens=512), Stage(share=0.3), Stage(share=0.3, candidates=0))
    config = replace(config, model=replace(config.model, candidates=100), stages=stages)
    run(config, tmp_path / "ahead")
    assert len(set(graphs)) == 1
    graphs.clear()
    watched.forget()
    monkeypatch.setattr("paceline.train.compile_ahead.compile_ahead", lambda gradient, start: None)
    run(config, tmp_path / "late")
    assert len(set(graphs)) == 2, "each size of batch has code of its own; the head is not part of it"
    assert losses(tmp_path / "ahead") == losses(tmp_path / "late")
    one, other = weights(tmp_path / "ahead"), weights(tmp_path / "late")
    assert all(torch.equal(one[name], other[name]) for name in one)


# ---- the allocator


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], str]]:
    """What the allocator was told last. Its settings can be told without a GPU, and from torch 2.13 on also read."""
    if not hasattr(torch._C, "_accelerator_getAllocatorSettings"):
        pytest.skip("this torch does not tell its allocator's settings")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    yield torch._C._accelerator_getAllocatorSettings
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")


@pytest.mark.filterwarnings("ignore:.*_set_allocator_settings is deprecated:FutureWarning")
@pytest.mark.parametrize("asked", [False, True])
def test_the_allocator_expands_its_segments_only_if_asked_to(
    asked: bool, tmp_path: Path, allocator: Callable[[], str]
) -> None:
    config = tiny_config(tmp_path / "data")
    set_torch_switches(replace(config.train, expandable_segments=asked))
    assert allocator() == f"expandable_segments:{asked}"


def test_without_cuda_the_allocator_is_not_told(
    tmp_path: Path, allocator: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = tiny_config(tmp_path / "data")
    set_torch_switches(replace(config.train, expandable_segments=True))
    assert allocator() == "expandable_segments:False"
