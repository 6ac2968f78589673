"""The mask as two integers per token: since all its rules are causal and only look back so far, a query sees one
interval of keys that ends with itself, and a key is seen by one interval of queries that begins with itself. A property
test proves them equal to `masks.block_lists`."""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.units import BLOCK_TOKENS
from paceline.model.masks import MaskRule, blocks_of_window, dense_mask


@dataclass(frozen=True)
class Ranges:
    """(B or 1, T) int32 each, never falling along T."""

    first_key: Tensor
    """Query q sees the keys first_key[q] .. q."""
    end_query: Tensor
    """Key k is seen by the queries k .. end_query[k] - 1."""


def ranges_of(rule: MaskRule, documents_BT: Tensor | None, tokens: int, window: Tensor) -> Ranges:
    """The intervals of `masks.allowed`. Stays on the device; document ids must not decrease along a sequence."""
    position = torch.arange(tokens, device=window.device, dtype=torch.int32)
    first = torch.zeros_like(position)
    if rule.window_in_tokens:
        first = torch.maximum(first, position - window + 1)
    if rule.window_in_blocks:
        first = torch.maximum(first, (position // BLOCK_TOKENS - blocks_of_window(window) + 1) * BLOCK_TOKENS)
    first = first[None]
    if rule.by_document:
        assert documents_BT is not None
        opened = torch.searchsorted(documents_BT, documents_BT, out_int32=True)  # the first token with the same id
        first = torch.maximum(first, opened)
    first = first.to(torch.int32).contiguous()
    return Ranges(first, torch.searchsorted(first, position.expand_as(first).contiguous(), right=True, out_int32=True))


TRIAL_ERROR = 2e-2
"""Relative; bf16 operands leave about 5e-3."""


@functools.cache
def failed_trial(width: int, device: str = "cuda") -> str | None:
    """Why the Triton kernels do not work on this GPU, or None. They are compiled and run once, forward and backward,
    because they were only ever timed on an H200."""
    try:
        wrong = _trial_error(width, device)
    except Exception as error:  # a compiler or driver may fail in any way
        return f"a trial of the Triton kernels failed: {type(error).__name__}: {error!s:.200}".split("\n")[0]
    return None if wrong < TRIAL_ERROR else f"a trial of the Triton kernels is off by {wrong:.1%}"


def _trial_error(width: int, device: str) -> float:
    """Relative error of output and gradients against the plain twin, for two blocks under a window of one; nan if any
    is."""
    from paceline.kernels.attention import attend_dense
    from paceline.kernels.attention_ranges import attend_ranges

    tokens, scale = 2 * BLOCK_TOKENS, width**-0.5
    rule, window = MaskRule(False, True, False), torch.tensor(BLOCK_TOKENS, dtype=torch.int32, device=device)
    seen, mask = ranges_of(rule, None, tokens, window), dense_mask(rule, None, tokens, window)
    given = torch.randn(3, 1, tokens, 2, width, device=device).bfloat16().requires_grad_()
    exact = given.detach().float().requires_grad_()
    q, k, v = given.unbind()
    found = attend_ranges(q, k, v, seen.first_key, seen.end_query, scale=scale)
    q, k, v = exact.unbind()
    expected = attend_dense(q, k, v, mask, scale=scale)
    pairs = [(found.float(), expected)]
    pairs += zip(
        torch.autograd.grad(found.float().square().sum(), given),
        torch.autograd.grad(expected.square().sum(), exact),
        strict=True,
    )
    return float(torch.stack([(a.float() - b).norm() / b.norm() for a, b in pairs]).detach().amax())
