"""Models that cannot work are refused when they are described, by an error that names the flag."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import ConfigError
from paceline.recipes.presets import preset
from paceline.settings.model import LayerOverride, ModelConfig, RotaryConfig, WindowConfig

R18 = preset("r18-softcap").model

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"num_heads": 5}, r"--model.num-heads 5 x --model.head-dim 128 = 640 is not --model.width 768"),
    ({"width": 770}, r"is not --model.width 770; heads must divide the width"),
    ({"head_dim": 127, "width": 762}, r"--model.head-dim 127 is odd"),
    ({"qk_matrix_heads": 4}, r"--model.qk-matrix-heads 4 does not divide the 6 heads of the keys"),
    ({"num_kv_heads": 4}, r"--model.num-kv-heads 4 does not divide --model.num-heads 6"),
    ({"num_kv_heads": 0}, r"--model.num-kv-heads 0 must be at least 1"),
    ({"num_kv_heads": -2}, r"--model.num-kv-heads -2 must be at least 1"),
    ({"mlp_ratio": 0}, r"--model.mlp-ratio 0 must be at least 1"),
    ({"vocab_size": 0}, r"--model.vocab-size 0 must be at least 1"),
    ({"embedding_multiple": 0}, r"--model.embedding-multiple 0 must be at least 1"),
    ({"num_layers": 11}, r"--model.unet-skips .* --model.num-layers 11 is odd"),
    ({"num_layers": 11, "unet_skips": False, "value_path": "mirrored"}, r"--model.value-path mirrored .* 11 is odd"),
    ({"value_ends": 7}, r"--model.value-ends 7 needs 14 layers, --model.num-layers has 12; use between 1 and 6"),
    ({"value_ends": 0}, r"--model.value-ends 0"),
    ({"layers_without_attention": (12,)}, r"--model.layers-without-attention 12 does not exist"),
    ({"layers_without_attention": (-13,)}, r"--model.layers-without-attention -13 does not exist"),
    ({"value_path": "residual", "layers_without_attention": (0,)}, r"--model.value-path residual takes block 0"),
    ({"softcap": 0.0}, r"--model.softcap 0.0 must be positive"),
    ({"softcap": -15.0}, r"--model.softcap -15.0 must be positive"),
    ({"softcap": math.nan}, r"--model.softcap nan must be positive"),
    ({"softcap": math.inf}, r"--model.softcap inf must be positive"),
    ({"norm_eps": -1e-6}, r"--model.norm-eps -1e-06 must be a finite number"),
    ({"smear": True, "width": 10, "num_heads": 1, "head_dim": 10}, r"smear reads 12 numbers .* --model.width is 10"),
    ({"tied_lm_head": True, "embedding_multiple": 1}, r"--model.tied-lm-head needs equal rows, .* 50257 .* 50304"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[str(next(iter(c.items()))) for c, _ in REFUSED])
def test_a_model_that_cannot_work_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(R18, **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rotary_fraction": 0.0}, r"--model.rotary.rotary-fraction 0.0 is outside \(0, 1\]"),
        ({"rotary_fraction": 1.5}, r"--model.rotary.rotary-fraction 1.5 is outside \(0, 1\]"),
        ({"base": 1.0}, r"--model.rotary.base 1.0 must exceed 1"),
        ({"base": math.nan}, r"--model.rotary.base nan must exceed 1"),
        ({"max_tokens": 0}, r"--model.rotary.max-tokens 0 must be positive"),
    ],
)
def test_a_rotary_that_cannot_work_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RotaryConfig(**change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"unit": "blocks", "start_tokens": 64}, r"--model.window.start-tokens 64 .* shrinks below one quantum of 128"),
        ({"unit": "blocks", "growth_tokens": -128}, r"--model.window.growth-tokens -128 shrinks below one quantum"),
        ({"unit": "blocks", "quantum_tokens": 64}, r"--model.window.quantum-tokens 64 must be a multiple of 128"),
        ({"unit": "tokens", "quantum_tokens": 0}, r"--model.window.quantum-tokens 0 must be a multiple of 1"),
    ],
)
def test_a_window_that_shows_nothing_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        WindowConfig(**change)


def test_a_smear_takes_a_width_of_as_many_numbers_as_it_reads() -> None:
    assert replace(R18, smear=True, width=12, num_heads=1, head_dim=12).smear


def test_a_key_offset_needs_a_pair_that_turns_and_one_at_rest() -> None:
    """Of the four pairs of a head of 8: one to three that turn."""
    for turning in (1, 3):
        rotary, offset = RotaryConfig(rotary_fraction=turning / 4), (LayerOverride(layers=(0,), key_offset=True),)
        config = ModelConfig(width=8, num_heads=1, head_dim=8, rotary=rotary, layer_overrides=offset)
        assert config.rotary.pairs(8) == turning
        assert config.attending[0].key_offset
    with pytest.raises(ConfigError, match=r"layer 0: key_offset needs pairs at rest"):
        replace(config, rotary=RotaryConfig(rotary_fraction=1.0))


@given(
    start=st.integers(1, 4000), growth=st.integers(-4000, 4000), quantum=st.integers(1, 512), steps=st.integers(1, 500)
)
def test_every_accepted_window_stays_between_one_quantum_and_the_widest(
    start: int, growth: int, quantum: int, steps: int
) -> None:
    """Also one that shrinks. Chunked attention reaches only as far back as the widest."""
    try:
        window = WindowConfig(unit="tokens", start_tokens=start, growth_tokens=growth, quantum_tokens=quantum)
    except ConfigError:
        assert min(start, start + growth) < quantum
        return
    values = [window.tokens_at(step, steps) for step in range(steps + 1)]
    assert min(values) >= quantum
    assert max(values) <= window.widest_tokens
    assert all(value % quantum == 0 for value in values)
    assert values == sorted(values, reverse=growth < 0)


def test_sizes_that_follow_from_others() -> None:
    first, shape = R18.layers[0], R18.attending[0]
    assert (R18.kv_heads, first.mlp_width) == (6, 3072)
    assert (shape.q_width, shape.k_width, shape.v_width, shape.out_width) == (768, 768, 768, 768)
    grouped = replace(R18, num_kv_heads=2)
    shape = grouped.attending[0]
    assert (grouped.kv_heads, shape.q_width, shape.k_width, shape.v_width, shape.out_width) == (2, 768, 256, 256, 768)
    assert set(grouped.value_table_widths.values()) == {256}
    assert ModelConfig(vocab_size=128, embedding_multiple=128, lm_head_multiple=256).embedding_rows == 128
    assert ModelConfig(vocab_size=129, embedding_multiple=128, lm_head_multiple=256).lm_head_rows == 256
