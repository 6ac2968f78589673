"""Rotary positions against complex numbers in float64, and the roundings that the records carry."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from model.small import END_OF_TEXT, small
from paceline.model.gpt import GPT
from paceline.model.rotary import RotaryCosSin, frequencies, rotary_tables, rotate
from paceline.recipes.presets import preset
from paceline.settings.model import RotaryConfig

PLAIN = RotaryConfig(max_tokens=512)
TRUNCATED = RotaryConfig(base=1024.0, rotary_fraction=0.5, spacing="closed", max_tokens=512)


def turned(x: Tensor, config: RotaryConfig) -> Tensor:
    cos, sin = rotary_tables(config, x.size(-1))
    return rotate(x, RotaryCosSin(cos[: x.size(1)], sin[: x.size(1)]), config)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("name", ["r05-modern-arch", "r13-window-warmup"])
def test_records_up_to_13_space_64_frequencies_openly_from_base_10000(name: str) -> None:
    expected = [10_000 ** (-j / 64) for j in range(64)]
    assert frequencies(preset(name).model.rotary, 128).tolist() == pytest.approx(expected, rel=1e-6)


def test_record_4_has_32_frequencies() -> None:
    model = preset("r04-muon").model
    expected = [10_000 ** (-j / 32) for j in range(32)]
    assert frequencies(model.rotary, model.head_dim).tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", ["r17-sparse-values", "r18-softcap"])
def test_records_17_and_18_turn_32_of_64_pairs_and_end_at_one_over_1024(name: str) -> None:
    omega = frequencies(preset(name).model.rotary, 128).tolist()
    assert omega == pytest.approx([1024 ** (-j / 31) for j in range(32)], rel=1e-6)
    assert (omega[0], omega[-1]) == (1.0, pytest.approx(1 / 1024))


@pytest.mark.parametrize("name", ["r14-value-embed", "r15-unet-values", "r16-block-mask"])
def test_records_14_to_16_round_their_frequencies_through_bf16(name: str) -> None:
    rotary = preset(name).model.rotary
    rounded, exact = frequencies(rotary, 128), frequencies(replace(rotary, frequency_dtype="fp32"), 128)
    assert (round(float(exact[1]), 6), round(float(rounded[1]), 6)) == (0.865964, 0.867188)
    assert (round(float(exact[32]), 6), round(float(rounded[32]), 7)) == (0.01, 0.0100098)
    assert torch.equal(rounded, exact.bfloat16().float())
    assert 0.0035 < float(((rounded - exact) / exact).abs().max()) < 0.0037


def test_the_angle_is_an_fp32_product_even_where_frequency_and_table_are_bf16() -> None:
    """Position 257 does not exist in bf16; an angle formed there would be that of 256."""
    config = RotaryConfig(frequency_dtype="bf16", max_tokens=2048)
    cos, sin = rotary_tables(config, 128)
    omega = frequencies(config, 128).double()
    for t in (1, 255, 257, 1001, 2047):
        assert_close(cos[t].double(), torch.cos(t * omega), rtol=0, atol=2e-4)  # 2047 in fp32 is good to 1.2e-4
        assert_close(sin[t].double(), torch.sin(t * omega), rtol=0, atol=2e-4)
    assert not np.allclose(cos[257], cos[256], atol=1e-2)


@pytest.mark.parametrize("name", ["r04-muon", "r05-modern-arch", "r14-value-embed", "r17-sparse-values", "r18-softcap"])
def test_tables_are_stored_in_the_records_format(name: str) -> None:
    expected = torch.float32 if name in ("r04-muon", "r18-softcap") else torch.bfloat16
    model = preset(name).model
    cos, sin = rotary_tables(replace(model.rotary, max_tokens=300), model.head_dim)
    assert (cos.dtype, sin.dtype) == (expected, expected)
    assert cos.shape == sin.shape == (300, 32 if name in ("r04-muon", "r17-sparse-values", "r18-softcap") else 64)


@pytest.mark.parametrize("config", [PLAIN, TRUNCATED])
def test_pairs_half_a_head_apart_turn_by_minus_t_omega(config: RotaryConfig) -> None:
    """As complex numbers u_j + i u_{j + D/2}: each is multiplied by e^{-i t ω_j}; ω is 0 for pairs at rest."""
    x, half = normal(2, 40, 3, 16), 8
    omega = np.zeros(half)
    omega[: config.pairs(16)] = frequencies(config, 16).double().numpy()
    turn = np.exp(-1j * np.outer(np.arange(40), omega))[:, None, :]
    pairs = x.double().numpy()
    expected = (pairs[..., :half] + 1j * pairs[..., half:]) * turn
    y = turned(x, config).double().numpy()
    np.testing.assert_allclose(y[..., :half], expected.real, atol=2e-5)
    np.testing.assert_allclose(y[..., half:], expected.imag, atol=2e-5)


@settings(max_examples=20)
@given(q_at=st.integers(0, 200), k_at=st.integers(0, 200), by=st.integers(0, 300))
def test_a_product_of_query_and_key_depends_on_their_distance_only(q_at: int, k_at: int, by: int) -> None:
    q, k = normal(1, 1, 1, 16), normal(1, 1, 1, 16, seed=1)
    cos, sin = rotary_tables(PLAIN, 16)

    def product(q_at: int, k_at: int) -> float:
        at = [rotate(x, RotaryCosSin(cos[[t]], sin[[t]]), PLAIN) for x, t in ((q, q_at), (k, k_at))]
        return float((at[0] * at[1]).sum())

    assert product(q_at + by, k_at + by) == pytest.approx(product(q_at, k_at), abs=5e-4)


def test_position_matters() -> None:
    x = normal(1, 3, 1, 16)[:, :1].expand(1, 3, 1, 16)
    y = turned(x, PLAIN)
    assert torch.equal(y[:, 0], x[:, 0]), "position 0 does not turn"
    assert float((y[:, 2] - y[:, 1]).abs().max()) > 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("arithmetic", ["fp32", "activation"])
def test_pairs_at_rest_pass_through_bit_for_bit(dtype: torch.dtype, arithmetic: str) -> None:
    config = replace(TRUNCATED, arithmetic=arithmetic)
    x = normal(1, 64, 2, 16, dtype=dtype)
    y = turned(x, config)
    assert y.dtype == dtype
    at_rest = [4, 5, 6, 7, 12, 13, 14, 15]
    assert torch.equal(y[..., at_rest], x[..., at_rest])
    assert not torch.equal(y[:, 1:, :, :4], x[:, 1:, :, :4])


def test_fp32_arithmetic_rounds_once_and_activation_arithmetic_more_often() -> None:
    """Record 17 turned its bf16 queries in fp32: the result is the exact turn, rounded once."""
    x = normal(4, 256, 4, 16, dtype=torch.bfloat16)
    exact = turned(x.float(), PLAIN)
    once = turned(x, replace(PLAIN, arithmetic="fp32"))
    often = turned(x, replace(PLAIN, arithmetic="activation"))
    assert torch.equal(once, exact.bfloat16())
    assert float((often.float() - exact).norm()) > 1.2 * float((once.float() - exact).norm())


def test_shorter_sequences_take_the_first_rows() -> None:
    for config in (PLAIN, TRUNCATED):
        short, long = rotary_tables(replace(config, max_tokens=100), 16), rotary_tables(config, 16)
        assert torch.equal(short[0], long[0][:100])
        assert torch.equal(short[1], long[1][:100])


def test_the_tables_do_not_depend_on_the_model_and_are_not_saved() -> None:
    config = small("r18-softcap")
    model = GPT(config, end_of_text=END_OF_TEXT)
    cos, sin = rotary_tables(config.rotary, config.head_dim)
    buffers = dict(model.named_buffers())
    assert buffers.keys() == {"rotary_cos_8", "rotary_sin_8"}, "one pair for all layers with heads of one width"
    assert torch.equal(buffers["rotary_cos_8"], cos)
    assert torch.equal(buffers["rotary_sin_8"], sin)
    assert not [name for name in model.state_dict() if "rotary" in name]


def test_some_pair_always_turns() -> None:
    assert [RotaryConfig(rotary_fraction=share).pairs(16) for share in (0.001, 0.5, 1.0)] == [1, 4, 8]
