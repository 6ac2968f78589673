"""Inputs for the attention kernels, and their comparison with the dense definition in float64."""

import torch
from torch import Tensor

from paceline.backends.ranges import ranges_of
from paceline.kernels.attention import attend_dense
from paceline.kernels.attention_ranges import attend_ranges
from paceline.model.masks import MaskRule, dense_mask
from paceline.settings.model import ModelConfig, WindowConfig


def documents_of(sequences: int, tokens: int, device: str, *, mean_tokens: int) -> Tensor:
    """(B, T) int32 ids; besides random borders some at a block's edge and beside it."""
    generator = torch.Generator().manual_seed(1)
    opens = torch.rand((sequences, tokens), generator=generator) < 1 / mean_tokens
    opens[0, [127, 128]] = True
    opens[-1, tokens // 2 + 1] = True
    return opens.cumsum(-1, dtype=torch.int32).to(device)


def qkv_of(
    sequences: int, tokens: int, heads: int, kv_heads: int, width: int, dtype: torch.dtype, device: str, *, joined: bool
) -> tuple[list[Tensor], Tensor]:
    """q, k, v that ask for gradients, and a gradient of the output. `joined`: slices of one projection."""
    generator = torch.Generator().manual_seed(0)
    counts = (heads, kv_heads, kv_heads)
    x = torch.randn(sequences, tokens, sum(counts), width, generator=generator).to(device, dtype)
    parts = x.split(counts, dim=2)
    grad = torch.randn(sequences, tokens, heads, width, generator=generator).to(device, dtype)
    if not joined:
        parts = tuple(part.transpose(1, 2).contiguous().transpose(1, 2) for part in parts)  # heads before tokens
        grad = grad.transpose(1, 2).contiguous().transpose(1, 2)
    return [part.detach().requires_grad_() for part in parts], grad


def relative_error(a: Tensor, b: Tensor) -> float:
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm())


def check_parity(
    unit: str,
    *,
    documents: bool,
    window: int,
    dtype: torch.dtype,
    device: str,
    tolerance: float,
    tokens: int = 256,
    sequences: int = 2,
    heads: int = 2,
    kv_heads: int = 2,
    width: int = 64,
    joined: bool = True,
) -> None:
    """Output and the three gradients, each within `tolerance` of float64 in relative norm."""
    config = ModelConfig(window=WindowConfig(unit=unit), document_mask=documents)  # type: ignore[arg-type]
    rule, scale = MaskRule.of(config), width**-0.5
    ids = documents_of(sequences, tokens, device, mean_tokens=150) if documents else None
    size = torch.tensor(window, dtype=torch.int32, device=device)
    ranges = ranges_of(rule, ids, tokens, size)
    qkv, grad = qkv_of(sequences, tokens, heads, kv_heads, width, dtype, device, joined=joined)
    q, k, v = qkv
    y = attend_ranges(q, k, v, ranges.first_key, ranges.end_query, scale=scale)
    exact = [x.detach().double().requires_grad_() for x in qkv]
    judge = attend_dense(*exact, dense_mask(rule, ids, tokens, size), scale=scale)
    pairs = zip(
        [y, *torch.autograd.grad(y, qkv, grad)],
        [judge, *torch.autograd.grad(judge, exact, grad.double())],
        strict=True,
    )
    for name, (fast, slow) in zip(("output", "q", "k", "v"), pairs, strict=True):
        for side, values in (("the judge", slow), ("the kernel", fast)):
            assert values.isfinite().all(), f"{name}: {int((~values.isfinite()).sum())} values of {side} are not finite"
        error = relative_error(fast, slow)
        assert error < tolerance, f"{name}: relative error {error:.1e}"
