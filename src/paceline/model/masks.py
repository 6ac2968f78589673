"""Which tokens a token may attend to: the definition, and the same thing as lists of full and partial blocks.

`allowed` is the definition, element by element. `block_lists` classifies blocks of 128 queries by 128 keys from it:
a full block needs no element test, a partial block does, all others are not visited. Property tests prove the two
equal. The window is a 0-D tensor, so that it may change during training without a new compilation.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.units import BLOCK_TOKENS
from paceline.settings.model import ModelConfig

Windows = Sequence[int]
"""The attention window of each kind, in tokens, in the order of `ModelConfig.windows`; empty without windows."""


def window_tensor(windows: Windows, device: torch.device) -> Tensor:
    """As a forward pass takes them; one number that nothing reads where there are none."""
    return torch.tensor(list(windows) or [0], dtype=torch.int32, device=device)


@dataclass(frozen=True)
class MaskRule:
    """The static part of a mask; what changes (documents, window) is handed in as tensors."""

    by_document: bool
    window_in_tokens: bool
    window_in_blocks: bool

    @staticmethod
    def of(config: ModelConfig) -> "MaskRule":
        unit = config.window.unit
        return MaskRule(
            by_document=config.document_mask,
            window_in_tokens=unit in ("tokens", "tokens_in_blocks"),
            window_in_blocks=unit in ("blocks", "tokens_in_blocks"),
        )

    @property
    def only_causal(self) -> bool:
        return not (self.by_document or self.window_in_tokens or self.window_in_blocks)


def document_ids(tokens_BT: Tensor, end_of_text: int) -> Tensor:
    """(B, T) int32: how many documents have been opened up to and including each position. End-of-text opens one; the
    fragment before the first has id 0."""
    return (tokens_BT == end_of_text).cumsum(dim=-1, dtype=torch.int32)


def blocks_of_window(window: Tensor) -> Tensor:
    """Window in tokens, as a number of blocks, rounded up."""
    return (window + (BLOCK_TOKENS - 1)) // BLOCK_TOKENS


def allowed(rule: MaskRule, q: Tensor, k: Tensor, q_doc: Tensor | None, k_doc: Tensor | None, window: Tensor) -> Tensor:
    """The definition. q and k are true positions in the sequence; all arguments broadcast against each other."""
    ok = k <= q
    if rule.by_document:
        assert q_doc is not None
        assert k_doc is not None
        ok = ok & (q_doc == k_doc)
    if rule.window_in_tokens:
        ok = ok & (q - k < window)
    if rule.window_in_blocks:
        ok = ok & (q // BLOCK_TOKENS - k // BLOCK_TOKENS < blocks_of_window(window))
    return ok


def dense_mask(rule: MaskRule, documents_BT: Tensor | None, tokens: int, window: Tensor) -> Tensor:
    """(B or 1, T, T) bool, True where attention is allowed: the oracle, and the mask of short sequences."""
    position = torch.arange(tokens, device=window.device)
    q_doc = k_doc = None
    if documents_BT is not None:
        q_doc, k_doc = documents_BT[:, :, None], documents_BT[:, None, :]
    mask = allowed(rule, position[:, None], position[None, :], q_doc, k_doc, window)
    return mask if mask.dim() == 3 else mask[None]


@dataclass(frozen=True)
class BlockLists:
    """(B or 1, query blocks, key blocks) bool each; no block is in both."""

    full: Tensor
    partial: Tensor


def block_lists(rule: MaskRule, documents_BT: Tensor | None, tokens: int, window: Tensor) -> BlockLists:
    """Classify every pair of blocks. `tokens` must be a multiple of 128.

    The farthest pair of a block decides whether it is full, the nearest whether it is visited at all. Document ids
    never decrease along a sequence, so a block's first and last id bound the ids inside it."""
    index = torch.arange(tokens // BLOCK_TOKENS, device=window.device)
    back = index[:, None] - index[None, :]  # blocks between query and key
    visit, full = back >= 0, back > 0
    if rule.window_in_blocks:
        inside = back < blocks_of_window(window)
        visit, full = visit & inside, full & inside
    if rule.window_in_tokens:
        visit = visit & (back * BLOCK_TOKENS - (BLOCK_TOKENS - 1) < window)
        full = full & (back * BLOCK_TOKENS + (BLOCK_TOKENS - 1) < window)
    visit, full = visit[None], full[None]
    if rule.by_document:
        assert documents_BT is not None
        blocks = documents_BT.unflatten(-1, (-1, BLOCK_TOKENS))
        low, high = blocks[..., 0], blocks[..., -1]
        visit = visit & (low[:, :, None] <= high[:, None, :]) & (low[:, None, :] <= high[:, :, None])
        full = full & (low[:, :, None] == high[:, None, :]) & (low[:, None, :] == high[:, :, None])
    return BlockLists(full=full, partial=visit & ~full)


def full_block_share(lists: BlockLists) -> Tensor:
    """Share of the visited blocks that need no element test."""
    full = lists.full.sum()
    return full / (full + lists.partial.sum())
