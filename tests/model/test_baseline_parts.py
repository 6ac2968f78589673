"""What the baselines are made of: norms with weights, gates, learned positions, starts, and dropout. The whole of
`r01-baseline` is judged by GPT-2 itself in tests/evaluate/export/test_stock.py."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from model.small import END_OF_TEXT, random_tokens, shaken, windows
from paceline.model.dropout import Dropout, DropoutKeys, step_key
from paceline.model.gpt import GPT, Seams, run_recomputed
from paceline.model.ops import Norm
from paceline.settings.model import ModelConfig, RotaryConfig
from paceline.settings.spec import describe

SMALL = ModelConfig(vocab_size=40, width=48, num_layers=3, num_heads=6, head_dim=8, rotary=RotaryConfig(max_tokens=64))
TOKENS = random_tokens(4, 64, vocab_size=40)


def small(**changes: Any) -> ModelConfig:
    return replace(SMALL, **changes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "biases"), [("rms", False), ("rms_weighted", True), ("layer", False), ("layer", True)]
)
def test_a_norm_is_the_one_of_its_name_in_fp32(kind: str, biases: bool, dtype: torch.dtype) -> None:
    norm = Norm(small(norm=kind, biases=biases, norm_eps=0.1))
    assert {name for name, _ in norm.named_parameters()} == (
        set() if kind == "rms" else {"weight", "bias"} if kind == "layer" and biases else {"weight"}
    )
    generator = torch.Generator().manual_seed(0)
    for parameter in norm.parameters():
        parameter.data = torch.randn(48, generator=generator)
    x = torch.randn(3, 48, generator=generator).to(dtype)
    exact = x.double() - (x.double().mean(-1, keepdim=True) if kind == "layer" else 0.0)
    exact = exact / (exact.square().mean(-1, keepdim=True) + 0.1).sqrt()
    for name, parameter in norm.named_parameters():
        exact = exact * parameter.double() if name == "weight" else exact + parameter.double()
    found = norm(x)
    assert found.dtype == dtype
    assert_close(found.double(), exact.detach(), rtol=2**-8 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)


def test_a_gate_has_two_thirds_of_the_width_and_as_many_weights() -> None:
    plain, gated = ModelConfig(activation="gelu"), ModelConfig(activation="swiglu")
    assert (plain.mlp_width, gated.mlp_width) == (3072, 2048)
    assert describe(plain).product_weights("mlp") == describe(gated).product_weights("mlp")
    model = shaken(small(activation="swiglu"))
    mlp = model.blocks[0].mlp
    x = torch.randn(2, 48, generator=torch.Generator().manual_seed(0))
    expected = F.linear(F.silu(F.linear(x, mlp.gate)) * F.linear(x, mlp.up), mlp.down)
    assert_close(mlp(x, torch.zeros(2, 48)), expected)


def test_matrices_tables_and_head_start_as_gpt2_does() -> None:
    config = ModelConfig(
        vocab_size=2000, num_layers=2, matrix_init="gpt2", embedding_init="gpt2", lm_head_init="gpt2",
        positions="learned", biases=True, norm="layer",
    )  # fmt: skip
    for name, weight in GPT(config, end_of_text=END_OF_TEXT).state_dict().items():
        if weight.dim() == 1:
            assert set(weight.tolist()) == ({1.0} if name.endswith("norm.weight") else {0.0}), name
            continue
        output = name.endswith(("attention.output", "mlp.down"))
        assert float(weight.std()) == pytest.approx(0.02 / math.sqrt(4) if output else 0.02, rel=0.02), name
        assert abs(float(weight.mean())) < 1e-4, name


def test_learned_positions_tell_places_apart_and_nothing_turns() -> None:
    model = shaken(small(positions="learned"))
    assert not list(model.buffers())
    same = torch.full((1, 8), 9)
    with torch.no_grad():
        assert model.logits(same, windows())[0].std(dim=0).max() > 1e-3
        model.embeddings.position.zero_()
        spread = model.logits(same, windows())[0].std(dim=0).max()
    assert spread < 1e-5


def gradients(model: GPT, tokens: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    model(tokens, tokens, windows()).main.sum().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def placed(model: GPT, *, step: int, first: int) -> GPT:
    assert model.dropout is not None
    model.dropout.step_key.fill_(step_key(0, step))
    model.dropout.first_sequence.fill_(first)
    return model


def test_micro_batches_and_ranks_drop_what_the_whole_batch_drops() -> None:
    model = shaken(small(dropout=0.3))
    whole = gradients(placed(model, step=5, first=0), TOKENS)
    parts = [gradients(placed(model, step=5, first=first), TOKENS[first : first + 2]) for first in (0, 2)]
    for name, gradient in whole.items():
        assert_close(parts[0][name] + parts[1][name], gradient, rtol=1e-4, atol=1e-5)
    elsewhere = gradients(placed(model, step=5, first=1), TOKENS)
    another_step = gradients(placed(model, step=6, first=0), TOKENS)
    for other in (elsewhere, another_step):
        assert not torch.allclose(other["embeddings.token"], whole["embeddings.token"], rtol=1e-2)


def test_a_recomputed_block_drops_the_same() -> None:
    kept = shaken(small(dropout=0.3))
    again = GPT(small(dropout=0.3), end_of_text=END_OF_TEXT, seams=Seams(run_block=run_recomputed))
    again.load_state_dict(kept.state_dict())
    expected, found = (gradients(placed(model, step=1, first=0), TOKENS) for model in (kept, again))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_passes_without_gradients_drop_nothing() -> None:
    plain, dropping = shaken(SMALL), GPT(small(dropout=0.3), end_of_text=END_OF_TEXT)
    dropping.load_state_dict(plain.state_dict())
    with torch.no_grad():
        assert torch.equal(dropping.logits(TOKENS, windows()), plain.logits(TOKENS, windows()))
    assert not torch.equal(dropping.logits(TOKENS, windows()), plain.logits(TOKENS, windows()))


def masks(rate: float, tokens: Tensor = TOKENS) -> Tensor:
    """(places, B, T, D): whether a number is kept, at the places of a model of twelve layers."""
    keys = DropoutKeys(rate)(tokens, slice(0, tokens.size(1)))
    ones = torch.ones(*tokens.shape, 768)
    halves = [(place, second) for place in range(1, 25, 2) for second in (False, True)]
    return torch.stack([Dropout(rate, place=place)(ones, keys, second=second) != 0 for place, second in halves])


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_the_share_is_kept_along_every_axis_and_places_are_independent(rate: float) -> None:
    """Means of n numbers lie within five standard deviations."""
    kept = masks(rate).float()
    for axis in range(4):
        means = kept.mean(dim=[other for other in range(4) if other != axis])
        n = kept.numel() / kept.size(axis)
        assert (means - (1 - rate)).abs().max() < 5 * math.sqrt(rate * (1 - rate) / n)
    both = (kept[:-1] * kept[1:]).mean()
    assert float(both) == pytest.approx((1 - rate) ** 2, abs=0.002)
    neighbours = (kept[..., :-1] * kept[..., 1:]).mean()
    assert float(neighbours) == pytest.approx((1 - rate) ** 2, abs=0.002)
    tokens = (kept[:, :, :-1] * kept[:, :, 1:]).mean()
    assert float(tokens) == pytest.approx((1 - rate) ** 2, abs=0.002)


def test_the_mean_stays_where_it_was() -> None:
    x = torch.ones(4, 64, 768)
    dropped = Dropout(0.25, place=3)(x, DropoutKeys(0.25)(TOKENS, slice(0, 64)))
    assert dropped.unique().tolist() == pytest.approx([0.0, 4 / 3])
    assert float(dropped.mean()) == pytest.approx(1.0, abs=0.01)
