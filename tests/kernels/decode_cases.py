"""Attention over rings of cells against its plain twin in float64, on any device and in any format."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.fused_cases import relative_error, seeded
from paceline.evaluate.decode import Place, plan_plainly
from paceline.kernels.attention_decode import attend_cells, mark_seen

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""q, k, v, keys, values."""


def rank_slice(lengths: Sequence[int], ring: int, window: int, device: str) -> Place:
    """One new token after each text of so many; a query sees `window` tokens, itself included."""
    position = torch.tensor(lengths, device=device)[:, None]
    back = (position - torch.arange(ring, device=device)) % ring  # how long ago each cell was written
    mask = (back < window) & (back <= position)
    slots = torch.arange(len(lengths), device=device)[:, None]
    return Place(0, slots * ring + position % ring, mask[:, None])


def inputs_of(texts: int, ring: int, shape: tuple[int, int, int], device: str, dtype: torch.dtype) -> Inputs:
    """Heads are views of one projection, as the model makes them; there is a slot more than texts."""
    heads, kv_heads, width = shape
    joined = seeded(texts, 1, heads + 2 * kv_heads, width, seed=1).to(device, dtype)
    caches = (seeded(texts + 1, ring, kv_heads, width, seed=seed).to(device, dtype) for seed in (2, 3))
    return *joined.split([heads, kv_heads, kv_heads], dim=2), *caches


def check_parity(
    lengths: Sequence[int], ring: int, window: int, shape: tuple[int, int, int],
    *, device: str, dtype: torch.dtype, tolerance: float,
) -> None:  # fmt: skip
    """The output up to `tolerance`, the caches to the bit."""
    place, scale = rank_slice(lengths, ring, window, device), shape[2] ** -0.5
    q, k, v, keys, values = inputs_of(len(lengths), ring, shape, device, dtype)
    exact = [x.double() for x in (q, k, v, keys, values)]
    expected = plan_plainly(place, scale)(*exact)
    found = attend_cells(q, k, v, keys, values, mark_seen(place.cells, place.mask), scale)
    assert found.dtype == dtype
    assert found.is_contiguous()
    assert relative_error(found, expected) < tolerance
    assert torch.equal(keys.double(), exact[3])
    assert torch.equal(values.double(), exact[4])
