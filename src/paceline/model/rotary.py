"""Rotary positions. The tables are computed once, shared by all layers, and sliced to the sequence.

Pair j couples dimension j with j + head_dim/2 and is turned by -t·ω_j at position t. Positions count from the start of
the sequence, not of the document. With a turning share below 1 only the first pairs turn and only those are computed.
"""

import torch
from torch import Tensor

from paceline.model.config import RotaryConfig
from paceline.model.dtypes import torch_dtype


def turning_pairs(config: RotaryConfig, head_dim: int) -> int:
    return max(1, round(head_dim // 2 * config.turning_share))


def frequencies(config: RotaryConfig, head_dim: int) -> Tensor:
    """ω_j of the pairs that turn, fp32, fastest first."""
    pairs = turning_pairs(config, head_dim)
    steps = pairs if config.spacing == "open" else max(1, pairs - 1)
    exponents = torch.arange(pairs, dtype=torch.float32) / steps
    omega = torch.pow(1.0 / config.base, exponents)
    return omega.to(torch_dtype(config.frequency_dtype)).float()


def rotary_tables(config: RotaryConfig, head_dim: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each (max_tokens, turning pairs). The angle is an fp32 product: positions past 256 are not
    exact in bf16."""
    positions = torch.arange(config.max_tokens, dtype=torch.float32)
    angles = torch.outer(positions, frequencies(config, head_dim))
    dtype = torch_dtype(config.table_dtype)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x_BTHD: Tensor, cos: Tensor, sin: Tensor, config: RotaryConfig) -> Tensor:
    """Turn the first P pairs of every head by rows (T, P) or (B, T, P). Returns x's shape and dtype; the other pairs
    pass through untouched."""
    dtype = torch.float32 if config.arithmetic == "fp32" else x_BTHD.dtype
    cos, sin = cos[..., None, :].to(dtype), sin[..., None, :].to(dtype)
    pairs, half = cos.size(-1), x_BTHD.size(-1) // 2
    a, a_rest, b, b_rest = x_BTHD.split([pairs, half - pairs, pairs, half - pairs], dim=-1)
    turned_a = (a * cos + b * sin).to(x_BTHD.dtype)
    turned_b = (b * cos - a * sin).to(x_BTHD.dtype)
    return torch.cat([turned_a, a_rest, turned_b, b_rest], dim=-1)
