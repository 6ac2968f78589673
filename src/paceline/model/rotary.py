"""Rotary positions. The tables are computed once, shared by all layers, and sliced to the sequence.

Pair j couples dimension j with j + head_dim/2 and is turned by -t·ω_j at position t. Positions count from the start of
the sequence, not of the document. With a fraction below 1 only the first pairs turn and only those are computed.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.model.ops import torch_dtype
from paceline.settings.model import RotaryConfig


@dataclass(frozen=True)
class RotaryCosSin:
    """Rotary rows of the positions in this pass, each (T, pairs), or (B, T, pairs) where sequences stand at different
    ones."""

    cos: Tensor
    sin: Tensor


def frequencies(config: RotaryConfig, head_dim: int) -> Tensor:
    """ω_j of the pairs that turn, fp32, fastest first."""
    pairs = config.pairs(head_dim)
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


def rotate(x_BTHD: Tensor, rotary: RotaryCosSin, config: RotaryConfig) -> Tensor:
    """Turn the first P pairs of every head by rows (T, P) or (B, T, P). Returns x's shape and dtype; the other pairs
    pass through untouched."""
    dtype = torch.float32 if config.arithmetic == "fp32" else x_BTHD.dtype
    cos, sin = rotary.cos[..., None, :].to(dtype), rotary.sin[..., None, :].to(dtype)
    pairs, half = cos.size(-1), x_BTHD.size(-1) // 2
    a, a_rest, b, b_rest = x_BTHD.split([pairs, half - pairs, pairs, half - pairs], dim=-1)
    turned_a = (a * cos + b * sin).to(x_BTHD.dtype)
    turned_b = (b * cos - a * sin).to(x_BTHD.dtype)
    return torch.cat([turned_a, a_rest, turned_b, b_rest], dim=-1)
