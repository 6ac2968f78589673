"""The mask as two integers per token: since all its rules are causal and only look back so far, a query sees one
interval of keys that ends with itself, and a key is seen by one interval of queries that begins with itself. A property
test proves them equal to `masks.block_lists`."""

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.units import BLOCK_TOKENS
from paceline.model.masks import MaskRule, blocks_of_window


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
