"""Models whose every part says something, small enough to generate with: for tests of decoding and of exports."""

from dataclasses import replace

import torch
from torch import Tensor

from paceline.model.gpt import GPT
from paceline.model.masks import Windows, window_tensor
from paceline.settings.model import LayerOverride, MixConfig, ModelConfig, NgramConfig, RotaryConfig, WindowConfig

WINDOWS = {
    "blocks": WindowConfig(unit="blocks", start_tokens=128, growth_tokens=128),
    "tokens": WindowConfig(unit="tokens", start_tokens=64, growth_tokens=64, quantum_tokens=64),
    "tokens_in_blocks": WindowConfig(unit="tokens_in_blocks", start_tokens=64, growth_tokens=64, quantum_tokens=64),
    "none": WindowConfig(unit="none"),
}


LAYERS_OF_MANY_SHAPES = {
    "long_window": WindowConfig(unit="blocks", start_tokens=256, growth_tokens=0),
    "layer_overrides": (
        LayerOverride(layers=(1,), window="long", qk_dim=4, mlp_width=0),
        LayerOverride(layers=(0, -1), v_dim=6, mlp_width=40),
    ),
}
"""For a `small` model whose windows are counted in blocks."""

BETWEEN_LAYERS = {
    "num_layers": 6,
    "unet_skips": False,
    "skip": (0, 3),
    "backout_layer": 0,
    "residual_scales": True,
    "value_path": "listed",
    "value_layers": (0, 3, -1),
    "value_gates": True,
    "layers_without_attention": (4,),
    "long_window": WindowConfig(unit="blocks", start_tokens=256, growth_tokens=0),
    "layer_overrides": (
        LayerOverride(layers=(0,), v_dim=6, mlp_width=40, score_scale=0.2),
        LayerOverride(layers=(1,), window="long", qk_dim=12, mlp_width=0, attends_to=0, x0_gate=True),
        LayerOverride(layers=(2,), attention=False, mlp_width=24, x0_gate=True),
    ),
}
"""The same: switches by which layers read others, and the embedding."""
_OFFSET = LayerOverride(layers=(1, 3, 5), key_offset=True, ngram_gate=True)
PREVIOUS_TOKENS = {
    **BETWEEN_LAYERS,
    "smear": True,
    "ngrams": NgramConfig(bigram_rows=97, trigram_rows=103, sign_rows=16),
    "rotary": RotaryConfig(max_tokens=1024, rotary_fraction=0.5),
    "layer_overrides": (*BETWEEN_LAYERS["layer_overrides"], _OFFSET),
    "mixes": (
        MixConfig(before=5, sources=(-1, 2), starts=(0.2, 0.0)),
        MixConfig(before=6, sources=(3,), starts=(-0.5,)),
    ),
}
"""And those by which tokens read the ones before them."""


def lively(model: GPT) -> GPT:
    """Fresh weights say nothing (outputs start at 0), so every parameter gets noise."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    return model


def windows_of(model: GPT, tokens: int) -> Windows:
    """The same window for each kind that the model has; none where it has no window."""
    return (tokens,) * len(model.config.windows)


@torch.no_grad()
def logits_without_cache(model: GPT, tokens_BT: Tensor, *, windows: Windows) -> Tensor:
    """The next token's logits by a whole forward pass, which the cache must equal."""
    return model.logits(tokens_BT, window_tensor(windows, tokens_BT.device))[:, -1, : model.config.vocab_size]


def small(unit: str, **changes: object) -> GPT:
    config = ModelConfig(
        vocab_size=61,
        lm_head_multiple=16,
        width=32,
        num_layers=4,
        num_heads=4,
        head_dim=8,
        num_kv_heads=2,
        qk_norm="before_rotary",
        rotary=RotaryConfig(max_tokens=1024),
        x0_mix=True,
        unet_skips=True,
        value_path="sparse",
        value_ends=1,
        layers_without_attention=(2,),
        softcap=15.0,
        document_mask=True,
        window=WINDOWS[unit],
    )
    return lively(GPT(replace(config, **changes), end_of_text=0))
