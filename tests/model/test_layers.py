"""Layers that differ from each other: widths of heads, windows, layers without attention or MLP, against a plain dense
model that is written out here, layer by layer, in float64."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from model import plain
from model.small import END_OF_TEXT, random_tokens, shaken, windows
from paceline.backends.attention_plans import OverRanges, plan_flex, plan_ranges
from paceline.backends.ranges import ranges_of
from paceline.core.errors import ConfigError
from paceline.core.schema import from_dict, to_dict
from paceline.kernels.attention import attend_dense
from paceline.model.attention import Attend, plan_reference
from paceline.model.gpt import GPT, Seams
from paceline.model.masks import MaskRule, dense_mask, document_ids
from paceline.recipes.presets import preset
from paceline.settings import backends as sizes
from paceline.settings.model import LayerConfig, LayerOverride, ModelConfig, RotaryConfig, WindowConfig

SHORT, LONG, TOKENS, VOCAB = 16, 48, 96, 50
HEADS, GROUP = 4, 2  # query heads, and how many of them share a key head


def window(tokens: int) -> WindowConfig:
    return WindowConfig(unit="tokens", start_tokens=tokens, growth_tokens=0, quantum_tokens=1)


UNIFORM = ModelConfig(
    vocab_size=VOCAB, width=32, num_layers=6, num_heads=HEADS, head_dim=8, num_kv_heads=HEADS // GROUP, mlp_ratio=2,
    rotary=RotaryConfig(max_tokens=1024), qk_norm="before_rotary", x0_mix=True, unet_skips=True,
    value_path="layerwise", softcap=15.0, document_mask=True, window=window(SHORT), long_window=window(LONG),
)  # fmt: skip
VARIED = replace(
    UNIFORM,
    layer_overrides=(
        LayerOverride(layers=(0,), qk_dim=4, v_dim=6),
        LayerOverride(layers=(1, -1), mlp_width=0),
        LayerOverride(layers=(2,), window="long", mlp_width=20),
        LayerOverride(layers=(3,), attention=False),
        LayerOverride(layers=(-1,), qk_dim=12, window="long"),
    ),
)
QK_DIMS, V_DIMS = [4, 8, 8, None, 8, 12], [6, 8, 8, None, 8, 8]
WINDOWS = [SHORT, SHORT, LONG, None, SHORT, LONG]
MLP_WIDTHS = [64, 0, 20, 64, 64, 0]


def visible(tokens: Tensor, window: int) -> Tensor:
    t = torch.arange(len(tokens))
    documents = (tokens == END_OF_TEXT).cumsum(0)
    near = (t[None, :] <= t[:, None]) & (t[:, None] - t[None, :] < window)
    return near & (documents[:, None] == documents[None, :])


def turned(u: Tensor) -> Tensor:
    half = u.size(-1) // 2
    omega = torch.tensor([10_000 ** (-j / half) for j in range(half)], dtype=torch.float32)
    angle = (torch.arange(len(u), dtype=torch.float32)[:, None] * omega).double()[:, None]
    a, b = u[..., :half], u[..., half:]
    return torch.cat([a * angle.cos() + b * angle.sin(), b * angle.cos() - a * angle.sin()], dim=-1)


def attended(w: plain.Weights, layer: int, x: Tensor, tokens: Tensor, eps: float) -> Tensor:
    at, dims = f"blocks.{layer}.attention.", (QK_DIMS[layer], QK_DIMS[layer], V_DIMS[layer])
    heads = (HEADS, HEADS // GROUP, HEADS // GROUP)
    if at + "qkv" in w:
        matrices = w[at + "qkv"].split([n * dim for n, dim in zip(heads, dims, strict=True)])
    else:
        matrices = tuple(w[at + name] for name in ("query", "key", "value"))
    q, k, v = ((x @ m.T).unflatten(-1, (n, -1)) for m, n in zip(matrices, heads, strict=True))
    mix = w[at + "value_mix"]
    v = mix[0] * v + mix[1] * w[f"embeddings.values.{layer}"][tokens].view_as(v)
    q, k = (turned(plain.norm(u, eps)) for u in (q, k))
    mask, results = visible(tokens, WINDOWS[layer]), []
    for head in range(HEADS):
        scores = q[:, head] @ k[:, head // GROUP].T / math.sqrt(QK_DIMS[layer])
        results.append(scores.masked_fill(~mask, -math.inf).softmax(-1) @ v[:, head // GROUP])
    return torch.cat(results, dim=1) @ w[at + "output"].T


def dense_logits(w: plain.Weights, tokens: Tensor) -> Tensor:
    """(T,) ids -> (T, rows), by the lists above."""
    eps = 2.0**-23
    x = x0 = w["embeddings.token"][tokens]
    outputs: list[Tensor] = []
    for layer in range(6):
        if layer >= 3:
            x = x + w["skip_weights"][layer - 3] * outputs[5 - layer]
        alpha, beta = w[f"blocks.{layer}.x0_mix"]
        x = alpha * x + beta * x0
        if QK_DIMS[layer] is not None:
            x = x + attended(w, layer, plain.norm(x, eps), tokens, eps)
        if MLP_WIDTHS[layer]:
            hidden = plain.norm(x, eps) @ w[f"blocks.{layer}.mlp.up"].T
            assert hidden.size(1) == MLP_WIDTHS[layer]
            x = x + hidden.clamp(min=0) ** 2 @ w[f"blocks.{layer}.mlp.down"].T
        outputs.append(x)
    return 15.0 * torch.tanh(plain.norm(x, eps) @ w["head"].T / 15.0)


def sample(seed: int = 0) -> tuple[Tensor, Tensor]:
    tokens = random_tokens(2, TOKENS, vocab_size=VOCAB, seed=seed, document_every=40)
    return tokens, tokens.roll(-1, dims=1)


@pytest.mark.parametrize("qkv", ["separate", "fused"])
def test_layers_of_many_shapes_compute_what_a_dense_model_computes(qkv: str) -> None:
    model, (tokens, targets) = shaken(replace(VARIED, qkv=qkv)), sample()
    judge = {name: value.detach().double().requires_grad_() for name, value in model.named_parameters()}
    expected = torch.stack([dense_logits(judge, row) for row in tokens])
    assert_close(model.logits(tokens, windows(SHORT, LONG)).double(), expected, rtol=0, atol=1e-4)
    torch.nn.functional.cross_entropy(expected.flatten(0, 1), targets.flatten()).backward()
    model(tokens, targets, windows(SHORT, LONG)).main.mean().backward()
    for name, parameter in model.named_parameters():
        gradient = judge[name].grad
        assert gradient is not None
        assert parameter.grad is not None
        size = float(gradient.abs().max())
        assert size > 0, f"{name} does not reach the loss"
        assert float((parameter.grad.double() - gradient).abs().max()) <= 1e-3 * size, name


def test_a_layer_has_what_its_override_says_and_the_rest_as_all_others() -> None:
    found = [
        (s.qk_dim, s.v_dim, SHORT if s.window == "short" else LONG) if (s := layer.attention) else (None, None, None)
        for layer in VARIED.layers
    ]
    assert found == list(zip(QK_DIMS, V_DIMS, WINDOWS, strict=True))
    assert [layer.mlp_width for layer in VARIED.layers] == MLP_WIDTHS
    assert [layer.index for layer in VARIED.layers] == list(range(6))
    assert VARIED.value_table_widths == {0: 12, 1: 16, 2: 16, 4: 16, 5: 16}, "none for the layer without attention"


def test_heads_of_different_widths_turn_by_tables_of_their_own() -> None:
    model = GPT(VARIED, end_of_text=END_OF_TEXT)
    shapes = {name: tuple(table.shape) for name, table in model.named_buffers()}
    assert shapes == {f"rotary_{part}_{dim}": (1024, dim // 2) for part in ("cos", "sin") for dim in (4, 8, 12)}


def test_an_override_without_a_change_is_no_override() -> None:
    same = replace(UNIFORM, layer_overrides=(LayerOverride(layers=(0, 3)), LayerOverride(layers=(1,), qk_dim=8)))
    assert same.layers == UNIFORM.layers
    tokens, _ = sample()
    assert torch.equal(*(shaken(c).logits(tokens, windows(SHORT, LONG)) for c in (same, UNIFORM)))


def test_attention_may_be_switched_off_by_either_field_and_on_again_by_an_override() -> None:
    by_field = replace(UNIFORM, layers_without_attention=(3,))
    by_override = replace(UNIFORM, layer_overrides=(LayerOverride(layers=(3,), attention=False),))
    assert by_field.layers == by_override.layers
    both = replace(by_field, layer_overrides=(LayerOverride(layers=(3,), attention=True),))
    assert both.layers == UNIFORM.layers


def test_tables_of_different_widths_may_lie_side_by_side_in_one_matrix() -> None:
    tables, (tokens, _) = shaken(VARIED), sample()
    chunks = GPT(replace(VARIED, value_storage="chunks"), end_of_text=END_OF_TEXT)
    state = dict(tables.state_dict())
    pieces = [state.pop(f"embeddings.values.{table}") for table in (0, 1, 2, 4, 5)]
    chunks.load_state_dict({**state, "embeddings.value_chunks": torch.cat(pieces, dim=1)})
    assert torch.equal(*(model.logits(tokens, windows(SHORT, LONG)) for model in (tables, chunks)))


def test_layers_and_a_second_window_survive_a_config_file() -> None:
    written = json.loads(json.dumps(to_dict(VARIED)))
    assert from_dict(ModelConfig, written) == VARIED


# ---- the long window

TWO_WINDOWS = replace(UNIFORM, layer_overrides=(LayerOverride(layers=(2,), window="long"),))


def only_layer_2_long(config: ModelConfig, documents: Tensor | None, tokens: int, sizes: Tensor) -> Attend:
    """Plans of two models with one window each; a layer is handed to one of them by its number."""
    ones = [replace(config, window=kind, long_window=None, layer_overrides=()) for kind in config.windows.values()]
    short, long = (plan_reference(one, documents, tokens, sizes[i : i + 1]) for i, one in enumerate(ones))

    def attend(layer: LayerConfig, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (long if layer.index == 2 else short)(ones[0].layers[layer.index], q, k, v)

    return attend


@pytest.mark.parametrize("chunked", [False, True])
def test_a_long_window_on_one_layer_is_another_mask_for_that_layer_alone(
    chunked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    length, both = (640, (128, 256)) if chunked else (TOKENS, (SHORT, LONG))
    config = replace(TWO_WINDOWS, window=window(both[0]), long_window=window(both[1]))
    if chunked:
        monkeypatch.setattr(sizes, "DENSE_LIMIT_TOKENS", 256)
        monkeypatch.setattr(sizes, "CHUNK_TOKENS", 128)
    model = shaken(config)
    other = GPT(config, end_of_text=END_OF_TEXT, seams=Seams(plan=only_layer_2_long))
    other.load_state_dict(model.state_dict())
    tokens = random_tokens(1, length, vocab_size=VOCAB, document_every=10**6 if chunked else 40)
    found, expected = (m.logits(tokens, windows(*both)) for m in (model, other))
    assert torch.equal(found, expected)
    narrow = model.logits(tokens, windows(both[0], both[0]))
    wide = model.logits(tokens, windows(both[1], both[1]))
    assert not torch.equal(found, narrow)
    assert not torch.equal(found, wide)


def test_two_windows_of_one_size_are_one_window() -> None:
    tokens, _ = sample()
    one = replace(UNIFORM, long_window=None)
    found, expected = shaken(TWO_WINDOWS), shaken(one)
    assert torch.equal(found.logits(tokens, windows(SHORT, SHORT)), expected.logits(tokens, windows(SHORT)))


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_gives_each_layer_its_own_window() -> None:
    config = replace(TWO_WINDOWS, head_dim=16, width=64)
    model, tokens = shaken(config), random_tokens(1, 256, vocab_size=VOCAB, document_every=100)
    flex = GPT(config, end_of_text=END_OF_TEXT, seams=Seams(plan=plan_flex))
    flex.load_state_dict(model.state_dict())
    assert_close(*(m.logits(tokens, windows(SHORT, LONG)) for m in (flex, model)), rtol=1e-4, atol=1e-4)


def test_our_kernel_gets_the_range_of_each_layers_window() -> None:
    config, tokens = TWO_WINDOWS, random_tokens(1, 256, vocab_size=VOCAB, document_every=100)
    documents = document_ids(tokens, END_OF_TEXT)
    planned = plan_ranges(config, documents, 256, windows(SHORT, LONG))
    assert isinstance(planned, OverRanges)
    for layer in config.layers:
        expected = ranges_of(MaskRule.of(config), documents, 256, torch.tensor(LONG if layer.index == 2 else SHORT))
        assert torch.equal(planned.of(layer).first_key, expected.first_key)
        assert torch.equal(planned.of(layer).end_query, expected.end_query)


def test_the_long_window_may_be_counted_in_blocks() -> None:
    blocks = WindowConfig(unit="blocks", start_tokens=128, growth_tokens=0)
    config = replace(TWO_WINDOWS, window=blocks, long_window=replace(blocks, start_tokens=256), document_mask=False)
    q = k = v = torch.randn(1, 384, HEADS, 8, generator=torch.Generator().manual_seed(0))
    attend = plan_reference(config, None, 384, windows(128, 256))
    for layer, size in ((config.layers[0], 128), (config.layers[2], 256)):
        mask = dense_mask(MaskRule.of(config), None, 384, torch.tensor(size))
        expected = attend_dense(q, k, v, mask, scale=8**-0.5)
        assert_close(attend(layer, q, k, v), expected, rtol=1e-5, atol=1e-5)


# ---- what is refused

R18 = preset("r18-softcap").model
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"layers": (12,), "qk_dim": 64}, "--model.layer-overrides 12 does not exist; --model.num-layers is 12"),
    ({"layers": (-13,), "qk_dim": 64}, "--model.layer-overrides -13 does not exist"),
    ({"layers": (3,), "qk_dim": 63}, "--model.layer-overrides of layer 3: qk_dim 63 must be even"),
    ({"layers": (3,), "qk_dim": 0}, "--model.layer-overrides of layer 3: qk_dim 0 must be even"),
    ({"layers": (3,), "v_dim": 0}, "--model.layer-overrides of layer 3: qk_dim 128 must be even and v_dim 0 positive"),
    ({"layers": (3,), "mlp_width": -1}, "--model.layer-overrides of layer 3: mlp_width -1 is negative"),
    ({"layers": (3,), "window": "long"}, "layer 3: window long, but --model.long-window is not set"),
    ({"layers": (11,), "v_dim": 64}, "layer 11: v_dim 64 does not fit value table 2, which another layer uses"),
]  # fmt: skip


def refusal(**changes: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        replace(R18, **changes)
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize(("override", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_an_override_that_cannot_work_is_refused_in_one_line(override: dict[str, Any], message: str) -> None:
    assert message in refusal(layer_overrides=(LayerOverride(**override),))


def test_windows_that_do_not_go_together_are_refused() -> None:
    tokens = WindowConfig(unit="tokens")
    assert "--model.long-window.unit tokens is not --model.window.unit blocks" in refusal(long_window=tokens)
    none = WindowConfig(unit="none")
    assert "--model.long-window is set, but --model.window.unit is none" in refusal(window=none, long_window=none)


def test_values_of_another_width_cannot_be_mixed_with_those_of_block_0() -> None:
    narrow = (LayerOverride(layers=(3,), v_dim=64),)
    message = refusal(value_path="residual", layer_overrides=narrow)
    assert "layer 3: v_dim 64, but --model.value-path residual reuses block 0's values" in message


def test_both_layers_of_a_value_table_may_be_narrow() -> None:
    config = replace(R18, layer_overrides=(LayerOverride(layers=(2, 11), v_dim=64),))
    assert config.value_table_widths == {0: 768, 1: 768, 2: 384}
