"""Attention back ends. The plain twin works by chunks of queries against the keys that the widest window can reach.

All take q (B, T, H, D), k and v (B, T, H_kv, D) and return (B, T, H, D). Memory of the twin grows with
T x (reach + chunk), not T², so 65,536-token sequences fit; the current window is a mask inside the reach, so a change
of the window compiles nothing.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from paceline.core.units import BLOCK_TOKENS

ElementTest = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(sequence, head, query, key) -> allowed, for elements of partial blocks."""


def attend_dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, scale: float) -> Tensor:
    """Softmax attention with a bool mask (B or 1, queries, keys), or plainly causal where the mask is None."""
    k, v = _expand_groups(k, q.size(2)), _expand_groups(v, q.size(2))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    mask = None if mask is None else mask[:, None]
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale)
    return y.transpose(1, 2)


def attend_triangle(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, *, scale: float, rows: int) -> Tensor:
    """`attend_dense` under a causal mask, `rows` queries at a time against the keys up to the last of them: of the
    products that the mask would throw away, half are not made (CPU, 2,048 tokens, rows of 512: 39 % less time)."""
    if q.size(1) <= rows:
        return attend_dense(q, k, v, mask, scale=scale)
    parts = [
        attend_dense(q[:, first:end], k[:, :end], v[:, :end], mask[:, first:end, :end], scale=scale)
        for first, end in ((first, min(first + rows, q.size(1))) for first in range(0, q.size(1), rows))
    ]
    return torch.cat(parts, dim=1)


def attend_chunked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, *, scale: float) -> Tensor:
    """The same by chunks of queries. mask: (B or 1, chunks, queries of a chunk, reach + queries of a chunk) bool, whose
    last axis starts `reach` keys before the chunk; keys before the sequence must be masked."""
    batch, tokens, _, _ = q.shape
    chunks, queries, keys = mask.shape[1:]
    reach = keys - queries
    k, v = (_key_chunks(x, reach, queries) for x in (k, v))
    q = q.reshape(batch * chunks, queries, *q.shape[2:])
    mask = mask.expand(batch, -1, -1, -1).reshape(batch * chunks, queries, keys)
    return attend_dense(q, k, v, mask, scale=scale).reshape(batch, tokens, *q.shape[2:])


def _key_chunks(x_BTHD: Tensor, reach: int, queries: int) -> Tensor:
    """(B * chunks, reach + queries, H, D): for each chunk its own keys and the `reach` before them, zeros before 0."""
    padded = F.pad(x_BTHD, (0, 0, 0, 0, reach, 0))
    windows = padded.unfold(1, reach + queries, queries)  # (B, chunks, H, D, keys), a view
    return windows.permute(0, 1, 4, 2, 3).reshape(-1, reach + queries, *x_BTHD.shape[2:])


def _expand_groups(x: Tensor, heads: int) -> Tensor:
    """Repeat each key or value head for its group of query heads; nothing to do where there is one each."""
    return x if x.size(2) == heads else x.repeat_interleave(heads // x.size(2), dim=2)


def attend_flex(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, *, scale: float) -> Tensor:
    """FlexAttention over block lists, for compiled code on a GPU. Visits no block that the lists leave out."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    y = flex_attention(q, k, v, block_mask=mask, scale=scale, enable_gqa=k.size(1) != q.size(1))
    assert isinstance(y, Tensor)
    return y.transpose(1, 2)


def flex_block_mask(full: Tensor, partial: Tensor, test: ElementTest) -> BlockMask:
    """FlexAttention's form of (B, query blocks, key blocks) lists: per row the count of members and their indices in
    ascending order, the others after them."""
    return BlockMask.from_kv_blocks(*_ordered(partial), *_ordered(full), BLOCK_SIZE=BLOCK_TOKENS, mask_mod=test)


def _ordered(members: Tensor) -> tuple[Tensor, Tensor]:
    members = members[:, None]  # one list for all heads
    count = members.sum(dim=-1, dtype=torch.int32)
    indices = members.to(torch.int32).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return count, indices
