"""Attention of one new token a text over its ring of cells. Plain twin: `evaluate.decode.plan_plainly`, a write into
the cache and then `attend_dense`.

While one text is written there is one query a head, and PyTorch's kernels leave most of a GPU idle. Here a program
takes one head and some cells of a ring: one tile, no loop. What the mask hides is not read. A second kernel joins the
parts by their maxima and sums, in a fixed order. The program at the new token's cell takes key and value from the
arguments and puts them into the cache, which no other program reads there: no write comes before.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.attention_ranges import HIDDEN, LOG2_E, LOWEST

WIDEST = 256
"""Widths of heads up to here; those between two powers of 2 take the registers of the larger."""
CELLS, TILE, WARPS = 64, 8_192, 4
"""Cells of one program, as long as its keys are no more than TILE numbers, which registers hold. Record 18 has rings of
2,048 cells and six heads, so one text keeps up to 192 programs busy."""
PARTS = 32
"""Parts that are joined at a time."""
OLD, NEW = tl.constexpr(1), tl.constexpr(2)
"""Marks of cells that a query sees: its text's tokens before, and its own. Told apart by the mask's copy and not by an
index, because a compiler would work out the index anew for every layer, each time as a kernel."""


@triton.jit
def attention_decode_part(
    q_ptr, k_ptr, v_ptr, keys_ptr, values_ptr, seen_ptr, mixed_ptr, largest_ptr, total_ptr, scale_log2, ring, q_stride,
    k_stride, v_stride, GROUP: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, CELLS: tl.constexpr,
):  # fmt: skip
    """One head of one text over CELLS cells of its ring: values mixed by exp2(score - largest), and the sum of these
    weights, 0 where nothing is seen. Strides are from text to text; COLUMNS is the power of 2 that holds WIDTH."""
    part, head, text = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    kv_head, kv_heads = head // GROUP, tl.num_programs(1) // GROUP
    row = (text * tl.num_programs(1) + head) * tl.num_programs(0) + part
    cells = part * CELLS + tl.arange(0, CELLS)
    seen = tl.load(seen_ptr + text * ring + cells, mask=cells < ring, other=0)
    if tl.max(seen, 0) > 0:
        column = tl.arange(0, COLUMNS)
        inside = column < WIDTH
        is_new = (seen == NEW)[:, None] & inside[None, :]
        is_old = (seen == OLD)[:, None] & inside[None, :]
        place = ((text * ring + cells) * kv_heads + kv_head)[:, None] * WIDTH + column[None, :]
        new_k = tl.load(k_ptr + text * k_stride + kv_head * WIDTH + column, mask=inside, other=0.0)[None, :]
        new_v = tl.load(v_ptr + text * v_stride + kv_head * WIDTH + column, mask=inside, other=0.0)[None, :]
        keys = tl.where(is_new, new_k, tl.load(keys_ptr + place, mask=is_old, other=0.0))
        values = tl.where(is_new, new_v, tl.load(values_ptr + place, mask=is_old, other=0.0))
        writes = is_new & (head % GROUP == 0)  # of a group's heads one is enough
        tl.store(keys_ptr + place, keys, mask=writes)
        tl.store(values_ptr + place, values, mask=writes)
        q = tl.load(q_ptr + text * q_stride + head * WIDTH + column, mask=inside, other=0.0).to(tl.float32) * scale_log2
        score = tl.where(seen > 0, tl.sum(keys.to(tl.float32) * q[None, :], 1), HIDDEN)
        largest = tl.max(score, 0)
        weight = tl.exp2(score - largest)
        mixed = tl.sum(weight[:, None] * values.to(tl.float32), 0)
        tl.store(mixed_ptr + row * WIDTH + column, mixed, mask=inside)
        tl.store(largest_ptr + row, largest)
        tl.store(total_ptr + row, tl.sum(weight, 0))
    else:
        tl.store(largest_ptr + row, LOWEST)
        tl.store(total_ptr + row, 0.0)


@triton.jit
def attention_decode_join(
    mixed_ptr, largest_ptr, total_ptr, out_ptr, parts, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    ALL_PARTS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """One head of one text. A part that saw nothing has left no mixed values, so they are not read."""
    row = tl.program_id(0).to(tl.int64)
    column, every = tl.arange(0, COLUMNS), tl.arange(0, ALL_PARTS)
    top = tl.max(tl.load(largest_ptr + row * parts + every, mask=every < parts, other=LOWEST), 0)
    acc = tl.zeros((COLUMNS,), tl.float32)
    total = 0.0
    for first in range(0, parts, PARTS):
        part = first + tl.arange(0, PARTS)
        inside = part < parts
        sums = tl.load(total_ptr + row * parts + part, mask=inside, other=0.0)
        weight = tl.exp2(tl.load(largest_ptr + row * parts + part, mask=inside, other=LOWEST) - top)
        place = (row * parts + part)[:, None] * WIDTH + column[None, :]
        mixed = tl.load(mixed_ptr + place, mask=(sums > 0.0)[:, None] & (column < WIDTH)[None, :], other=0.0)
        acc += tl.sum(weight[:, None] * mixed, 0)
        total += tl.sum(weight * sums, 0)
    tl.store(out_ptr + row * WIDTH + column, (acc / total).to(out_ptr.dtype.element_ty), mask=column < WIDTH)


def cells_of_part(width: int) -> int:
    return min(CELLS, TILE // triton.next_power_of_2(width))


def mark_seen(cells: Tensor, mask: Tensor) -> Tensor:
    """(B, 1, ring) uint8 from the new tokens' cells (B, 1), counted through all slots, and the mask (B, 1, ring), which
    shows each of them itself: 0, OLD or NEW."""
    ring = mask.size(2)
    return mask.to(torch.uint8) + (torch.arange(ring, device=mask.device) == cells[:, :, None] % ring)


@torch.library.custom_op("paceline::attend_cells", mutates_args=("keys", "values"))
def attend_cells(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scale: float) -> Tensor:
    """q (B, 1, H, D) over the first B slots of the caches `keys` and `values` (slots, ring, KV, D), after k and v
    (B, 1, KV, D) were put into them where `seen` says, as `mark_seen` makes it. Returns (B, 1, H, D) in q's dtype; D
    at most `WIDEST`.

    An operator that names what it writes, so that a compiler lets it write in place. It must be given the caches
    themselves: with a view torch 2.11 would copy the whole cache there and back."""
    q, k, v = (heads if heads[0, 0].is_contiguous() else heads.contiguous() for heads in (q, k, v))
    (batch, _, heads, width), ring = q.shape, keys.size(1)
    cells = cells_of_part(width)
    parts = triton.cdiv(ring, cells)
    mixed = q.new_empty((batch, heads, parts, width), dtype=torch.float32)
    largest, total = q.new_empty((2, batch, heads, parts), dtype=torch.float32)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    numbers = (scale * LOG2_E, ring, *(x.stride(0) for x in (q, k, v)))
    sizes = {"WIDTH": width, "COLUMNS": triton.next_power_of_2(width), "num_warps": WARPS}
    attention_decode_part[(parts, heads, batch)](
        q, k, v, keys, values, seen, mixed, largest, total, *numbers, GROUP=heads // k.size(2), CELLS=cells, **sizes
    )
    attention_decode_join[(batch * heads,)](
        mixed, largest, total, out, parts, ALL_PARTS=triton.next_power_of_2(parts), PARTS=PARTS, **sizes
    )
    return out


@attend_cells.register_fake
def _(q, k, v, keys, values, seen, scale):
    return torch.empty_like(q, memory_format=torch.contiguous_format)
