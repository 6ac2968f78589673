"""Scaled residual streams, gates, one skip, backout, attention to an earlier layer: the model against its formula."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from model.test_previous import lively, tokens_of
from paceline.core.errors import ConfigError
from paceline.model.gpt import GPT
from paceline.model.ops import rms_norm
from paceline.recipes.presets import preset
from paceline.settings.model import LayerOverride, MixConfig, NgramConfig

SHAPE = replace(
    preset("demo").model,
    vocab_size=300, width=64, num_heads=2, head_dim=32, num_layers=6, unet_skips=False, x0_mix=False,
    value_path="listed", value_layers=(1, -1), value_gates=True, value_init_std=0.01, tied_lm_head=True,
    embedding_init="small", matrix_init="half", attention_output_starts=True, residual_scales=True, skip=(1, 3),
    backout_layer=2, softcap_shift=4.0, ngrams=NgramConfig(bigram_rows=512),
    layer_overrides=(
        LayerOverride(layers=(3,), attention=False),
        LayerOverride(layers=(4,), attention=False, mlp_width=0, x0_gate=True),
        LayerOverride(layers=(0, 1), x0_gate=True, ngram_gate=True),
        LayerOverride(layers=(5,), attends_to=2, score_scale=0.1),
    ),
    mixes=(
        MixConfig(before=5, sources=(-1, 3), starts=(0.0, 0.3)),
        MixConfig(before=6, sources=(1, -1, 2), starts=(0.0, 0.2, -0.5)),
    ),
)  # fmt: skip
"""The layer map of the newest records, small."""
WIDE = torch.tensor([128], dtype=torch.int32)
"""A window that reaches over every test's tokens."""


def by_formula(model: GPT, tokens: Tensor) -> Tensor:
    """Logits in float64, layer by layer, from the weights alone."""
    w = {name: parameter.detach().double() for name, parameter in model.named_parameters()}
    c, count = model.config, tokens.size(-1)
    documents = (tokens == 0).cumsum(-1)
    seen = torch.ones(count, count).tril().bool() & (documents[:, :, None] == documents[:, None, :])

    def norm(x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + c.norm_eps).rsqrt()

    def heads(x: Tensor, matrix: Tensor) -> Tensor:
        return (x @ matrix.T).unflatten(-1, (2, 32))

    def attention(path: str, a: Tensor, table: Tensor | None, scale: float) -> Tensor:
        q, k, v = (heads(a, w[f"{path}{name}"]) for name in ("query", "key", "value"))
        cos, sin = (part.double() for part in (model.rotary_cos_32[:count], model.rotary_sin_32[:count]))
        q, k = (turned(norm(x), cos, sin) for x in (q, k))
        if table is not None:
            rows = table[tokens]
            read = torch.cat([a[..., :6], rows[..., :6]], -1)
            gate = 2 * torch.sigmoid(read @ w[f"{path}value_gate"].T)
            v = v + gate[..., None] * rows.unflatten(-1, (2, 32))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
        share = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
        y = torch.einsum("bhqk,bkhd->bqhd", share, v).flatten(-2)
        return w[f"{path}output_scale"] * (y @ w[f"{path}output"].T)

    x0 = norm(w["embeddings.token"][tokens])
    n = model.embeddings.ngrams_of(tokens, None).double()
    x = x0 + w["ngram_gate"] * n
    first, kept = x, list[Tensor]()

    def mixed(x: Tensor, layer: int) -> Tensor:
        mix = next(each for each in c.mixes if each.before == layer)
        inner = torch.nn.functional.gelu(x @ w[f"mixes.{layer}.hidden"].T)
        shares = 0.1 * (inner @ w[f"mixes.{layer}.weights"].T + w[f"mixes.{layer}.bias"])
        sources = [first if source == -1 else kept[source] for source in mix.sources]
        return x + sum(shares[..., k, None] * source for k, source in enumerate(sources))

    for layer in c.layers:
        path, shape = f"blocks.{layer.index}.", layer.attention
        x = mixed(x, 5) if layer.index == 5 else x
        if layer.index == 3:
            x = x + torch.sigmoid(w["skip_gate"]) * kept[1]
        scales = w[f"{path}residual_scales"]
        stream = scales[0] * x
        stream = stream + (w[f"{path}x0_gate"] * x0 if layer.x0_gate else 0)
        stream = stream + (w[f"{path}ngram_gate"] * n if layer.ngram_gate else 0)
        if shape is not None:
            table = None if shape.value_table is None else w[f"embeddings.values.{shape.value_table}"]
            read = kept[2] if layer.index == 5 else x
            stream = stream + attention(f"{path}attention.", norm(read), table, 0.1 if layer.index == 5 else 32**-0.5)
        x = stream
        if layer.mlp_width:
            hidden = (norm(x) @ w[f"{path}mlp.up"].T).relu().square()
            x = scales[1] * x + w[f"{path}mlp.output_scale"] * (hidden @ w[f"{path}mlp.down"].T)
        kept.append(x)
    logits = norm(mixed(x - w["backout"] * kept[2], 6)) @ w["embeddings.token"].T
    return 15 * torch.tanh((logits + 4) / 15)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    pairs, half = cos.size(-1), x.size(-1) // 2
    a, b = x[..., :half].clone(), x[..., half:].clone()
    c, s = cos[:, None], sin[:, None]
    a[..., :pairs], b[..., :pairs] = (
        x[..., :pairs] * c + x[..., half : half + pairs] * s,
        x[..., half : half + pairs] * c - x[..., :pairs] * s,
    )
    return torch.cat([a, b], dim=-1)


def test_the_model_is_its_formula() -> None:
    model, tokens = lively(SHAPE), tokens_of(96)
    torch.testing.assert_close(model.logits(tokens, WIDE).double(), by_formula(model, tokens), rtol=1e-4, atol=1e-4)


def test_at_the_start_gates_are_open_by_one_and_the_stream_has_unit_power_before_the_head() -> None:
    model, tokens = GPT(SHAPE, end_of_text=0), tokens_of(96)
    for name in ("blocks.0.attention.output", "blocks.0.mlp.down"):
        assert bool(dict(model.named_parameters())[name].any()) is name.endswith("output")
    assert rms_norm(model.embeddings(tokens, slice(0, 96)), 0.0).square().mean().item() == pytest.approx(1.0, abs=1e-3)
    loss = model(tokens, tokens.flip(-1), WIDE).main.mean()  # others than its own, to which a tied head leans
    assert loss.item() == pytest.approx(torch.tensor(SHAPE.lm_head_rows).log().item(), abs=0.02)
    torch.testing.assert_close(model.logits(tokens, WIDE).double(), by_formula(model, tokens), rtol=1e-4, atol=1e-4)


def test_each_weight_gets_a_gradient() -> None:
    model, tokens = lively(SHAPE), tokens_of(96)
    model(tokens, tokens.roll(-1, dims=1), WIDE).main.sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


def test_a_recomputed_block_gives_the_same_gradients() -> None:
    from paceline.model.gpt import Seams, run_recomputed

    tokens, found = tokens_of(64), []
    for seams in (Seams(), Seams(run_block=run_recomputed)):
        model = GPT(SHAPE, end_of_text=0, seams=seams)
        model.load_state_dict(lively(SHAPE).state_dict())
        model(tokens, tokens.roll(-1, dims=1), WIDE).main.sum().backward()
        found.append({name: parameter.grad for name, parameter in model.named_parameters()})
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("--model.skip", {"skip": (3, 1)}),
        ("--model.skip 9 does not exist", {"skip": (1, 9)}),
        ("--model.backout-layer 6 does not exist", {"backout_layer": 6}),
        ("list layers with --model.value-path listed only", {"value_layers": ()}),
        ("--model.value-gates needs tables", {"value_path": "plain", "value_layers": ()}),
        (
            "sources are earlier layers",
            {"mixes": (MixConfig(before=5, sources=(5,), starts=(0.0,)),)},
        ),
        ("are not a finite number for each", {"mixes": (MixConfig(before=5, sources=(1,), starts=(0.0, 1.0)),)}),
        ("two stand before the same layer", {"mixes": (MixConfig(before=5, sources=(1,), starts=(0.0,)),) * 2}),
        ("--model.softcap-shift 4.0 needs --model.softcap", {"softcap": None}),
        ("attends_to 5 is not an earlier layer", {"layer_overrides": (LayerOverride(layers=(5,), attends_to=5),)}),
    ],
)
def test_what_does_not_fit_is_refused_by_name(message: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(SHAPE, **changes)
