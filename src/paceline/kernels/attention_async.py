"""Attention of queries that see one interval of keys, with products in flight, for a Hopper GPU with Gluon.

The kernels of `attention_ranges`, with the same inputs, masks and endings. Triton waits for each product before it goes
on, so a program's matrix units idle while it forms weights, and only a second program on the multiprocessor fills in:
about 40 % of their rate. Here one warp group issues products and waits for no more than it needs: there is always one
in flight beside the exponentials and beside the gradients of the scores. The same warps order the copies of the next
tiles as soon as a slot of the ring is free. In a step of record 18 on an H200: query gradient 0.42 ms, key gradient
0.60 ms, where the Triton kernels with the same endings take 0.62 and 0.76; forward as fast.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from paceline.kernels.attention_ranges import HIDDEN, LOG2_E, LOWEST, Tiles, as_rows, constants
from paceline.kernels.gluon_tiles import accumulator, barriers, halves, operand, ring_of

meet = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # Triton 3.7 and 3.6
"""A barrier of all threads of the program."""
FORWARD = Tiles(queries=64, keys=64, warps=4, stages=2)
BACKWARD_QUERIES = Tiles(queries=64, keys=64, warps=4, stages=2)
BACKWARD_KEYS = Tiles(queries=64, keys=64, warps=4, stages=2)
"""Two programs fit a multiprocessor. Each warp must have 16 rows of the program's own tile."""


@gluon.jit
def finish(first_ready, second_ready, kept_ready, STAGES: gl.constexpr):
    """End stores, then barriers, which no thread waits for any more. Until then the compiler keeps their memory for
    them: it would take that of a barrier nobody names any more for what layouts are changed in, which barriers do not
    bear."""
    tma.store_wait(0)
    for n in gl.static_range(STAGES):
        mbarrier.invalidate(first_ready.index(n))
        mbarrier.invalidate(second_ready.index(n))
    mbarrier.invalidate(kept_ready.index(0))


@gluon.jit
def send(desc, row, column, tile, staging):
    """Store a tile through shared memory that nothing else reads any more."""
    staging.store(tile.to(desc.dtype))
    fence_async_shared()  # what threads wrote must be visible to the copy engine
    tma.async_copy_shared_to_global(desc, [row, column], staging)


@gluon.jit
def whole(left, right, ROWS: gl.constexpr, HALF: gl.constexpr):
    """The inverse of `halves`."""
    x = gl.reshape(gl.permute(gl.join(left, right), (0, 2, 1)), (ROWS, 2 * HALF))
    return gl.convert_layout(x, accumulator(2 * HALF, gl.num_warps()), assert_trivial=True)


@gluon.jit
def through_rotary_and_norm(
    grad, kept, row, position, head, tables, NORMS: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr,
    PAIRS: gl.constexpr,
):  # fmt: skip
    """The gradient of the raw projection (ROWS, WIDTH), given that of the normalised and rotated heads, which lie in
    shared memory: s·R⁻¹(dy - y·mean(dy·y)), as `qkv_rope.raw_gradient`."""
    cos_ptr, sin_ptr, norm_ptr = tables
    HALF: gl.constexpr = WIDTH // 2
    y = kept.load(grad.type.layout).to(gl.float32)
    along = gl.sum(grad * y, 1) * (1.0 / WIDTH)
    rows = gl.arange(0, ROWS, along.type.layout)
    norm = gl.load(norm_ptr + (row + rows).to(gl.int64) * NORMS + head)
    a, b = halves((grad - y * along[:, None]) * norm[:, None], ROWS, HALF)
    layout: gl.constexpr = accumulator(HALF, gl.num_warps())
    column = gl.arange(0, HALF, gl.SliceLayout(0, layout))[None, :]
    angle = (position + gl.arange(0, ROWS, gl.SliceLayout(1, layout)))[:, None] * PAIRS + column
    rotates = (column < PAIRS) & (angle >= 0)  # always true, for the shape
    cos = gl.load(cos_ptr + angle, mask=rotates, other=1.0).to(gl.float32)
    sin = gl.load(sin_ptr + angle, mask=rotates, other=0.0).to(gl.float32)
    return whole(a * cos - b * sin, a * sin + b * cos, ROWS, HALF)


@gluon.jit
def order_pair(descs, rows, column, rings, slots, wanted):
    """Order a tile each of two matrices into its slot, if wanted. Each has a ring and barriers of its own, so that the
    compiler finds no conflict between the two and puts one barrier of threads before both."""
    first, second, first_ready, second_ready = rings
    first_arrives, second_arrives = first_ready.index(slots[0]), second_ready.index(slots[1])
    mbarrier.expect(first_arrives, descs[0].block_type.nbytes, pred=wanted[0])
    mbarrier.expect(second_arrives, descs[1].block_type.nbytes, pred=wanted[1])
    tma.async_copy_global_to_shared(descs[0], [rows[0], column], first_arrives, first.index(slots[0]), pred=wanted[0])
    tma.async_copy_global_to_shared(descs[1], [rows[1], column], second_arrives, second.index(slots[1]), pred=wanted[1])


@gluon.jit
def order_turn(first_desc, second_desc, row, column, rings, turn, turns, STAGES: gl.constexpr):
    """`order_pair` for a turn, if there is one of that number."""
    slot = turn % STAGES
    wanted = turn < turns
    order_pair((first_desc, second_desc), (row, row), column, rings, (slot, slot), (wanted, wanted))


@gluon.jit
def tile_and_member(turn, span, GROUP: gl.constexpr):
    """Which tile of queries, of which query head of the group: the members' tiles follow each other."""
    if GROUP == 1:
        tile, member = turn, 0
    else:
        tile, member = turn % span, turn // span
    return tile, member


@gluon.jit
def attention_key_gradient(
    q_desc, k_desc, v_desc, grad_desc, grad_k_desc, grad_v_desc, raw_v_desc, embed_desc, grad_embed_desc, lse_ptr,
    delta_ptr, end_ptr, cos_ptr, sin_ptr, norm_ptr, mix_ptr, parts_ptr, scale, scale_log2, tokens, range_stride,
    HEADS: gl.constexpr, GROUP: gl.constexpr, WIDTH: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, RAW: gl.constexpr, PAIRS: gl.constexpr, MIXED: gl.constexpr, EMBED: gl.constexpr,
):  # fmt: skip
    """One key tile of one key head, as `attention_ranges.attention_key_gradient`; scores are keys by queries.

    A turn issues scores, then gradients of weights; beside the latter it forms weights, and with them issues values'
    gradient; beside that, gradients of scores, and with them issues keys' gradient, which the next turn waits for."""
    gl.static_assert(BLOCK_M == BLOCK_N or not MIXED, "the ending reads tiles of values into slots of the ring")
    KV_HEADS: gl.constexpr = HEADS // GROUP
    score_layout: gl.constexpr = accumulator(BLOCK_M, gl.num_warps())
    sum_layout: gl.constexpr = accumulator(WIDTH, gl.num_warps())
    weight_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=sum_layout, k_width=2)
    start = gl.program_id(0) * BLOCK_N
    batch, kv_head = gl.program_id(1) // KV_HEADS, gl.program_id(1) % KV_HEADS
    row, column = batch * tokens, kv_head * WIDTH
    q_ring, grad_ring, kept = ring_of(q_desc, STAGES), ring_of(grad_desc, STAGES), ring_of(k_desc, 2)
    q_ready, grad_ready, kept_ready = barriers(STAGES), barriers(STAGES), barriers(1)
    k_tile, v_tile = kept.index(0), kept.index(1)
    rings = (q_ring, grad_ring, q_ready, grad_ready)
    fence_async_shared()  # the copy engine must see the barriers too
    meet()

    end_ptr += batch.to(gl.int64) * range_stride
    begin = start // BLOCK_M * BLOCK_M
    span = gl.cdiv(gl.load(end_ptr + start + BLOCK_N - 1) - begin, BLOCK_M)
    turns = gl.maximum(GROUP * span, 1)  # it always is, but now the compiler makes no path around the loop
    mbarrier.expect(kept_ready.index(0), 2 * k_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(k_desc, [row + start, column], kept_ready.index(0), k_tile)
    tma.async_copy_global_to_shared(v_desc, [row + start, column], kept_ready.index(0), v_tile)
    for turn in gl.static_range(STAGES - 1):
        tile, member = tile_and_member(turn, span, GROUP)
        head = kv_head * GROUP + member
        order_turn(q_desc, grad_desc, row + begin + tile * BLOCK_M, head * WIDTH, rings, turn, turns, STAGES)
    end_query = gl.load(end_ptr + start + gl.arange(0, BLOCK_N, gl.SliceLayout(1, score_layout)))
    full_begin = (start + BLOCK_N - 1 + BLOCK_M - 1) // BLOCK_M * BLOCK_M  # from here on, no query before a key
    full_end = gl.maximum(gl.load(end_ptr + start) // BLOCK_M * BLOCK_M, full_begin)
    lse_ptr += (batch * HEADS + kv_head * GROUP).to(gl.int64) * tokens
    delta_ptr += (batch * HEADS + kv_head * GROUP).to(gl.int64) * tokens
    by_thread = gl.arange(0, BLOCK_M, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    by_query: gl.constexpr = gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[0])
    lse_row = gl.allocate_shared_memory(gl.float32, [BLOCK_M], by_query)
    delta_row = gl.allocate_shared_memory(gl.float32, [BLOCK_M], by_query)
    columns = gl.arange(0, BLOCK_M, gl.SliceLayout(0, score_layout))
    none = gl.zeros((BLOCK_N, BLOCK_M), gl.float32, score_layout)
    acc_k = warpgroup_mma_init(gl.zeros((BLOCK_N, WIDTH), gl.float32, sum_layout))
    acc_v = warpgroup_mma_init(gl.zeros((BLOCK_N, WIDTH), gl.float32, sum_layout))
    mbarrier.wait(kept_ready.index(0), 0)
    meet()  # else the compiler puts one into the loop, for what was ordered before it
    for turn in range(turns):
        slot, phase = turn % STAGES, (turn // STAGES) & 1
        tile, member = tile_and_member(turn, span, GROUP)
        begin_queries = begin + tile * BLOCK_M
        lse = gl.load(lse_ptr + (member * tokens + begin_queries) + by_thread)
        delta = gl.load(delta_ptr + (member * tokens + begin_queries) + by_thread)
        q_tile, grad_tile = q_ring.index(slot), grad_ring.index(slot)
        mbarrier.wait(q_ready.index(slot), phase)
        s = warpgroup_mma(k_tile, q_tile.permute((1, 0)), none, use_acc=False, is_async=True)
        mbarrier.wait(grad_ready.index(slot), phase)
        dp = warpgroup_mma(v_tile, grad_tile.permute((1, 0)), none, use_acc=False, is_async=True)
        s, sum_k, sum_v = warpgroup_mma_wait(1, deps=[s, acc_k, acc_v])
        meet()  # products of the turn before are done in all warps: its slot is free
        later = turn + STAGES - 1
        tile, member = tile_and_member(later, span, GROUP)
        head = kv_head * GROUP + member
        order_turn(q_desc, grad_desc, row + begin + tile * BLOCK_M, head * WIDTH, rings, later, turns, STAGES)
        lse_row.store(lse)
        delta_row.store(delta)
        p = gl.exp2(s * scale_log2 - lse_row.load(columns.type.layout)[None, :])
        if (begin_queries < full_begin) | (begin_queries >= full_end):
            first = start - begin_queries + gl.arange(0, BLOCK_N, gl.SliceLayout(1, score_layout))
            end = end_query - begin_queries
            p = gl.where((columns[None, :] >= first[:, None]) & (columns[None, :] < end[:, None]), p, 0.0)
        acc_v = warpgroup_mma(gl.convert_layout(p.to(q_desc.dtype), weight_layout), grad_tile, sum_v, is_async=True)
        dp = warpgroup_mma_wait(1, deps=[dp])
        ds = (p * (dp - delta_row.load(columns.type.layout)[None, :])).to(q_desc.dtype)
        acc_k = warpgroup_mma(gl.convert_layout(ds, weight_layout), q_tile, sum_k, is_async=True)
    sum_k, sum_v = warpgroup_mma_wait(0, deps=[acc_k, acc_v])
    meet()  # nobody reads shared memory any more

    if MIXED:
        slot, phase = turns % STAGES, (turns // STAGES) & 1
        order_turn(raw_v_desc, embed_desc, row + start, column, rings, turns, turns + 1, STAGES)
        parts_ptr += (gl.program_id(1) * gl.num_programs(0) + gl.program_id(0)) * 2
        mbarrier.wait(q_ready.index(slot), phase)
        mbarrier.wait(grad_ready.index(slot), phase)  # before sums, which may pass through memory of a ring
        raw_v_tile, embed_tile = q_ring.index(slot), grad_ring.index(slot)
        gl.store(parts_ptr, gl.sum(gl.sum(sum_v * raw_v_tile.load(sum_layout).to(gl.float32), 1), 0))
        if EMBED:
            gl.store(parts_ptr + 1, gl.sum(gl.sum(sum_v * embed_tile.load(sum_layout).to(gl.float32), 1), 0))
            send(grad_embed_desc, row + start, column, sum_v * gl.load(mix_ptr + 1).to(gl.float32), embed_tile)
        sum_v *= gl.load(mix_ptr).to(gl.float32)
    send(grad_v_desc, row + start, column, sum_v, v_tile)
    sum_k *= scale
    if RAW:
        tables = (cos_ptr, sin_ptr, norm_ptr)
        sum_k = through_rotary_and_norm(
            sum_k, k_tile, row + start, start, HEADS + kv_head, tables, HEADS + KV_HEADS, BLOCK_N, WIDTH, PAIRS
        )
    send(grad_k_desc, row + start, column, sum_k, k_tile)
    finish(q_ready, grad_ready, kept_ready, STAGES)


@gluon.jit
def seen(columns, first, last):
    """Whether a row sees a column: first .. last, all counted from the tile's first column."""
    return (columns[None, :] >= first[:, None]) & (columns[None, :] <= last[:, None])


@gluon.jit
def attention_query_gradient(
    q_desc, k_desc, v_desc, grad_desc, grad_q_desc, out_ptr, lse_ptr, delta_ptr, first_ptr, cos_ptr, sin_ptr, norm_ptr,
    scale, scale_log2, tokens, range_stride, out_stride, HEADS: gl.constexpr, GROUP: gl.constexpr, WIDTH: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, RAW: gl.constexpr, PAIRS: gl.constexpr,
):  # fmt: skip
    """One query tile of one head, as `attention_ranges.attention_query_gradient`.

    A turn issues scores, then gradients of weights; beside the latter it forms weights. With the gradients of scores it
    issues the sum, which the next turn waits for together with its scores."""
    score_layout: gl.constexpr = accumulator(BLOCK_N, gl.num_warps())
    sum_layout: gl.constexpr = accumulator(WIDTH, gl.num_warps())
    weight_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=sum_layout, k_width=2)
    by_row: gl.constexpr = gl.SliceLayout(1, score_layout)
    start = gl.program_id(0) * BLOCK_M
    batch, head = gl.program_id(1) // HEADS, gl.program_id(1) % HEADS
    row, column = batch * tokens, head // GROUP * WIDTH
    k_ring, v_ring, kept = ring_of(k_desc, STAGES), ring_of(v_desc, STAGES), ring_of(q_desc, 2)
    k_ready, v_ready, kept_ready = barriers(STAGES), barriers(STAGES), barriers(1)
    q_tile, grad_tile = kept.index(0), kept.index(1)
    rings = (k_ring, v_ring, k_ready, v_ready)
    fence_async_shared()  # the copy engine must see the barriers too
    meet()

    first_ptr += batch.to(gl.int64) * range_stride
    begin = gl.load(first_ptr + start) // BLOCK_N * BLOCK_N
    turns = gl.maximum(gl.cdiv(start + BLOCK_M - begin, BLOCK_N), 1)  # no path around the loop for the compiler
    mbarrier.expect(kept_ready.index(0), 2 * q_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(q_desc, [row + start, head * WIDTH], kept_ready.index(0), q_tile)
    tma.async_copy_global_to_shared(grad_desc, [row + start, head * WIDTH], kept_ready.index(0), grad_tile)
    for turn in gl.static_range(STAGES - 1):
        order_turn(k_desc, v_desc, row + begin + turn * BLOCK_N, column, rings, turn, turns, STAGES)
    full_end = (start + 1) // BLOCK_N * BLOCK_N  # from here on, keys later than the tile's first query
    full_begin = gl.cdiv(gl.load(first_ptr + start + BLOCK_M - 1), BLOCK_N) * BLOCK_N
    full_begin = gl.minimum(full_begin, full_end)
    rows = gl.arange(0, BLOCK_M, by_row)
    first = gl.load(first_ptr + start + rows)
    by_query = gl.program_id(1).to(gl.int64) * tokens + start
    lse = gl.load(lse_ptr + by_query + rows)
    columns = gl.arange(0, BLOCK_N, gl.SliceLayout(0, score_layout))
    none = gl.zeros((BLOCK_M, BLOCK_N), gl.float32, score_layout)
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [gl.num_warps(), 1], [1, 0])
    out_row = (row + start + gl.arange(0, BLOCK_M, gl.SliceLayout(1, wide))).to(gl.int64)
    out_column = head * WIDTH + gl.arange(0, WIDTH, gl.SliceLayout(0, wide))
    out = gl.load(out_ptr + out_row[:, None] * out_stride + out_column[None, :])
    mbarrier.wait(kept_ready.index(0), 0)
    delta = gl.sum(out.to(gl.float32) * grad_tile.load(wide).to(gl.float32), 1)
    delta = gl.convert_layout(delta, by_row)
    gl.store(delta_ptr + by_query + rows, delta)
    acc = warpgroup_mma_init(gl.zeros((BLOCK_M, WIDTH), gl.float32, sum_layout))
    meet()  # else the compiler puts one into the loop, for what was ordered before it
    for turn in range(turns):
        slot, phase = turn % STAGES, (turn // STAGES) & 1
        begin_keys = begin + turn * BLOCK_N
        k_tile, v_tile = k_ring.index(slot), v_ring.index(slot)
        mbarrier.wait(k_ready.index(slot), phase)
        s = warpgroup_mma(q_tile, k_tile.permute((1, 0)), none, use_acc=False, is_async=True)
        mbarrier.wait(v_ready.index(slot), phase)
        dp = warpgroup_mma(grad_tile, v_tile.permute((1, 0)), none, use_acc=False, is_async=True)
        s, total = warpgroup_mma_wait(1, deps=[s, acc])
        meet()  # products of the turn before are done in all warps: its slot is free
        later = turn + STAGES - 1
        order_turn(k_desc, v_desc, row + begin + later * BLOCK_N, column, rings, later, turns, STAGES)
        p = gl.exp2(s * scale_log2 - lse[:, None])
        if (begin_keys < full_begin) | (begin_keys >= full_end):
            p = gl.where(seen(columns, first - begin_keys, start - begin_keys + rows), p, 0.0)
        dp, p = warpgroup_mma_wait(0, deps=[dp, p])  # p too: else it would be formed after the wait
        ds = (p * (dp - delta[:, None])).to(k_desc.dtype)
        acc = warpgroup_mma(gl.convert_layout(ds, weight_layout), k_tile, total, is_async=True)
    total = warpgroup_mma_wait(0, deps=[acc])
    meet()  # nobody reads shared memory any more

    total *= scale
    if RAW:
        tables = (cos_ptr, sin_ptr, norm_ptr)
        NORMS: gl.constexpr = HEADS + HEADS // GROUP
        total = through_rotary_and_norm(
            total, q_tile, row + start, start, head, tables, NORMS, BLOCK_M, WIDTH, PAIRS
        )  # fmt: skip
    send(grad_q_desc, row + start, head * WIDTH, total, q_tile)
    finish(k_ready, v_ready, kept_ready, STAGES)


@gluon.jit
def order_ahead(k_desc, v_desc, row, column, rings, turn, turns, BLOCK_N: gl.constexpr, STAGES: gl.constexpr):
    """Order the keys of a turn and the values of the turn before it, as far as there are such turns."""
    rows = (row + turn * BLOCK_N, row + (turn - 1) * BLOCK_N)
    slots = (turn % STAGES, (turn + STAGES - 1) % STAGES)
    wanted = (turn < turns, (turn > 0) & (turn <= turns))
    order_pair((k_desc, v_desc), rows, column, rings, slots, wanted)


@gluon.jit
def softmax(s, largest, total, scale_log2):
    """Weights of a tile of scores, the new maxima and sums of all rows, and by what earlier sums shrink."""
    new = gl.maximum(largest, gl.max(s, 1) * scale_log2)
    p = gl.exp2(s * scale_log2 - new[:, None])
    shrink = gl.exp2(largest - new)
    return p, new, total * shrink + gl.sum(p, 1), shrink


@gluon.jit
def attention_forward(
    q_desc, k_desc, v_desc, out_desc, lse_ptr, first_ptr, scale_log2, tokens, range_stride, HEADS: gl.constexpr,
    GROUP: gl.constexpr, WIDTH: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One query tile of one head, as `attention_ranges.attention_forward`.

    A turn issues the scores of its keys, then the sum with the weights and values of the turn before; beside the latter
    it forms its own weights."""
    score_layout: gl.constexpr = accumulator(BLOCK_N, gl.num_warps())
    sum_layout: gl.constexpr = accumulator(WIDTH, gl.num_warps())
    weight_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=sum_layout, k_width=2)
    by_row: gl.constexpr = gl.SliceLayout(1, score_layout)
    start = gl.program_id(0) * BLOCK_M
    batch, head = gl.program_id(1) // HEADS, gl.program_id(1) % HEADS
    row, column = batch * tokens, head // GROUP * WIDTH
    k_ring, v_ring, kept = ring_of(k_desc, STAGES), ring_of(v_desc, STAGES), ring_of(q_desc, 1)
    k_ready, v_ready, kept_ready = barriers(STAGES), barriers(STAGES), barriers(1)
    q_tile = kept.index(0)
    rings = (k_ring, v_ring, k_ready, v_ready)
    fence_async_shared()  # the copy engine must see the barriers too
    meet()

    first_ptr += batch.to(gl.int64) * range_stride
    begin = gl.load(first_ptr + start) // BLOCK_N * BLOCK_N
    turns = gl.cdiv(start + BLOCK_M - begin, BLOCK_N)
    mbarrier.expect(kept_ready.index(0), q_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(q_desc, [row + start, head * WIDTH], kept_ready.index(0), q_tile)
    for turn in gl.static_range(STAGES):
        order_ahead(k_desc, v_desc, row + begin, column, rings, turn, turns, BLOCK_N, STAGES)
    full_end = (start + 1) // BLOCK_N * BLOCK_N  # from here on, keys later than the tile's first query
    full_begin = gl.cdiv(gl.load(first_ptr + start + BLOCK_M - 1), BLOCK_N) * BLOCK_N
    full_begin = gl.minimum(full_begin, full_end)
    rows = gl.arange(0, BLOCK_M, by_row)
    first = gl.load(first_ptr + start + rows)
    columns = gl.arange(0, BLOCK_N, gl.SliceLayout(0, score_layout))
    none = gl.zeros((BLOCK_M, BLOCK_N), gl.float32, score_layout)
    largest = gl.full((BLOCK_M,), LOWEST, gl.float32, by_row)
    total = gl.zeros((BLOCK_M,), gl.float32, by_row)
    acc = gl.zeros((BLOCK_M, WIDTH), gl.float32, sum_layout)
    mbarrier.wait(kept_ready.index(0), 0)
    mbarrier.wait(k_ready.index(0), 0)
    s = warpgroup_mma(q_tile, k_ring.index(0).permute((1, 0)), none, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    if (begin < full_begin) | (begin >= full_end):
        s = gl.where(seen(columns, first - begin, start - begin + rows), s, HIDDEN)
    p, largest, total, _ = softmax(s, largest, total, scale_log2)
    weights = gl.convert_layout(p.to(v_desc.dtype), weight_layout)
    mbarrier.wait(k_ready.index(1 % STAGES), (1 // STAGES) & 1, pred=turns > 1)
    for turn in range(1, turns):
        before, later = turn - 1, turn + 1
        meet()  # products of the turn before are done in all warps: its slots are free
        order_ahead(k_desc, v_desc, row + begin, column, rings, before + STAGES, turns, BLOCK_N, STAGES)
        begin_keys = begin + turn * BLOCK_N
        k_tile, v_tile = k_ring.index(turn % STAGES), v_ring.index(before % STAGES)
        s = warpgroup_mma(q_tile, k_tile.permute((1, 0)), none, use_acc=False, is_async=True)
        mbarrier.wait(v_ready.index(before % STAGES), (before // STAGES) & 1)
        acc = warpgroup_mma(weights, v_tile, acc, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s])
        if (begin_keys < full_begin) | (begin_keys >= full_end):
            s = gl.where(seen(columns, first - begin_keys, start - begin_keys + rows), s, HIDDEN)
        p, largest, total, shrink = softmax(s, largest, total, scale_log2)
        # The wait for the next keys keeps the assembler, too, from forming p only after the sum is done.
        mbarrier.wait(k_ready.index(later % STAGES), (later // STAGES) & 1, pred=later < turns)
        acc, p = warpgroup_mma_wait(0, deps=[acc, p])
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, sum_layout), assert_trivial=True)[:, None]
        weights = gl.convert_layout(p.to(v_desc.dtype), weight_layout)
    last = turns - 1
    mbarrier.wait(v_ready.index(last % STAGES), (last // STAGES) & 1)
    acc = warpgroup_mma(weights, v_ring.index(last % STAGES), acc, is_async=True)
    gl.store(lse_ptr + gl.program_id(1).to(gl.int64) * tokens + start + rows, largest + gl.log2(total))
    acc = warpgroup_mma_wait(0, deps=[acc])
    meet()  # nobody reads shared memory any more
    acc = acc / gl.convert_layout(total, gl.SliceLayout(1, sum_layout), assert_trivial=True)[:, None]
    send(out_desc, row + start, head * WIDTH, acc, q_tile)
    finish(k_ready, v_ready, kept_ready, STAGES)


@dataclass(frozen=True)
class Raw:
    """For gradients of the projections that gave q, k and v, instead of those of q, k and v (`qkv_rope`)."""

    cos: Tensor
    sin: Tensor
    norm: Tensor
    """Scales of the norms, (N, H + H_kv) fp32."""
    raw_v: Tensor
    """Values before they were mixed, (N, H_kv, D), a part of the joined projection."""
    mix: Tensor | None
    value_embed: Tensor | None
    grad_embed: Tensor
    parts: Tensor
    """(key tiles x key heads, 2) fp32, to be filled: parts of the gradient of `mix`."""


def _operands(rows: int, *tensors: Tensor) -> list[TensorDescriptor]:
    """Tensors (B, T, H, D) that the copy engine moves in tiles of so many tokens of one head."""
    return [operand(as_rows(x), rows, x.size(3)) for x in tensors]


def _endings(raw: Raw | None, unread: Tensor) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
    """Angles and norms for the endings of the backward kernels, and switches."""
    if raw is None:
        return (unread, unread, unread), {"RAW": False, "PAIRS": 0}
    return (raw.cos, raw.sin, raw.norm), {"RAW": True, "PAIRS": raw.cos.size(1)}


def launch_forward(
    q: Tensor, k: Tensor, v: Tensor, first_key: Tensor, scale: float, tiles: Tiles = FORWARD
) -> tuple[Tensor, Tensor]:
    """As `attention_ranges.launch_forward`, for bf16 and fp16."""
    batch, tokens, heads, _ = q.shape
    out, lse = q.new_empty(q.shape), q.new_empty((batch, heads, tokens), dtype=torch.float32)
    descs = (*_operands(tiles.queries, q), *_operands(tiles.keys, k, v), *_operands(tiles.queries, out))
    numbers = (scale * LOG2_E, tokens, tokens if first_key.size(0) > 1 else 0)
    grid = (tokens // tiles.queries, batch * heads)
    attention_forward[grid](*descs, lse, first_key, *numbers, STAGES=tiles.stages, **constants(q, k, tiles))
    return out, lse


def launch_query_gradient(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, first_key: Tensor, scale: float,
    tiles: Tiles, grad_q: Tensor, raw: Raw | None = None,
) -> Tensor:  # fmt: skip
    """As `attention_ranges.launch_query_gradient`, for bf16 and fp16; by `raw`, the gradient of the projection which
    was normalised and rotated to give q."""
    batch, tokens, heads, _ = q.shape
    delta, out_rows = torch.empty_like(lse), as_rows(out)
    descs = (*_operands(tiles.queries, q), *_operands(tiles.keys, k, v), *_operands(tiles.queries, grad, grad_q))
    tables, switches = _endings(raw, unread=lse)
    numbers = (scale, scale * LOG2_E, tokens, tokens if first_key.size(0) > 1 else 0, out_rows.stride(0))
    sizes = {"STAGES": tiles.stages, **constants(q, k, tiles)}
    grid = (tokens // tiles.queries, batch * heads)
    attention_query_gradient[grid](*descs, out_rows, lse, delta, first_key, *tables, *numbers, **switches, **sizes)
    return delta


def launch_key_gradient(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, end_query: Tensor, scale: float,
    tiles: Tiles, grad_k: Tensor, grad_v: Tensor, raw: Raw | None = None,
) -> None:  # fmt: skip
    """As `attention_ranges.launch_key_gradient`, for bf16 and fp16; by `raw`, the gradients of the projections which
    were normalised and rotated to give k, and mixed to give v. Each program leaves its part of the mixing scalars'
    gradient in its row of `raw.parts`, to be summed in a fixed order."""
    batch, tokens, kv_heads, _ = k.shape
    tables, switches = _endings(raw, unread=lse)
    raw_v, mix, parts = v, lse, lse  # unread
    if mixed := raw is not None and raw.mix is not None:
        raw_v, mix, parts = raw.raw_v.view(v.shape), raw.mix, raw.parts
    value_embed, grad_embed = raw_v, grad_v  # unread, but an order for two tiles must have two sources
    if with_embed := raw is not None and raw.value_embed is not None:
        value_embed, grad_embed = raw.value_embed.view(v.shape), raw.grad_embed.view(v.shape)
    descs = (*_operands(tiles.queries, q), *_operands(tiles.keys, k, v), *_operands(tiles.queries, grad))
    descs += (*_operands(tiles.keys, grad_k, grad_v, raw_v, value_embed, grad_embed),)
    numbers = (scale, scale * LOG2_E, tokens, tokens if end_query.size(0) > 1 else 0)
    switches |= {"MIXED": mixed, "EMBED": with_embed, "STAGES": tiles.stages, **constants(q, k, tiles)}
    grid = (tokens // tiles.keys, batch * kv_heads)
    attention_key_gradient[grid](*descs, lse, delta, end_query, *tables, mix, parts, *numbers, **switches)


def fill_gradients(
    grads: tuple[Tensor, Tensor, Tensor], grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    first_key: Tensor, end_query: Tensor, scale: float, raw: Raw | None = None,
) -> None:  # fmt: skip
    """Both kernels. `grads` take the gradients of q, k and v, or by `raw` those of their projections."""
    delta = launch_query_gradient(grad, q, k, v, out, lse, first_key, scale, BACKWARD_QUERIES, grads[0], raw)
    launch_key_gradient(grad, q, k, v, lse, delta, end_query, scale, BACKWARD_KEYS, *grads[1:], raw)
