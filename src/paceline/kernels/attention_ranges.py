"""Attention of queries that see one interval of keys, in Triton, for GPUs from capability 8.0 on.

Plain twin: `attend_dense`. Under a causal mask within documents and a window, query q sees exactly the keys
first_key[q] .. q, and first_key never falls along a sequence: two integers per token say which tiles are visited, which
of them need no element test, and the test itself. The other direction, key k seen by the queries k .. end_query[k] - 1,
serves the backward pass.

Softmax is in base 2 with running maxima, sums in fp32. Backward takes two kernels, by query tile (which also leaves
sum(o * do) for the other) and by key tile; each forms the probabilities anew: 7 products where 5 would do, but every
sum has a fixed order. On Hopper in half precision `attention_async` takes their place, and they are its judge.
Tried and dropped: one backward kernel with atomic sums, and other ways to pipeline (docs/experiments.md).
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.core.probe import HOPPER
from paceline.core.units import BLOCK_TOKENS

WIDTHS = (64, 128)
LOG2_E = 1.4426950408889634
HIDDEN = tl.constexpr(float("-inf"))
"""Score of a pair that the mask forbids: its weight is 0, since the maximum of its row is finite."""
LOWEST = tl.constexpr(-3.0e38)
"""Maximum of a row that has seen nothing yet: -inf cannot be subtracted from -inf. HIDDEN may not be finite instead:
`score * scale - maximum` is one fused operation, so a score of -1e30 less its own rounded product leaves the rounding
error, some 1e21 either way, and where that is positive (heads of 64) exp2 of it is inf."""


@dataclass(frozen=True)
class Tiles:
    """How one kernel cuts its work. `queries` and `keys` are tokens of a tile and divide 128."""

    queries: int
    keys: int
    warps: int
    stages: int
    """Tiles in flight in the loop. A copy is issued at the end of a turn: with 2, the next turn waits for it."""
    registers: int | None = None
    """Most registers of a thread; None leaves that to the compiler."""


FORWARD = Tiles(queries=64, keys=64, warps=4, stages=2)
BACKWARD_QUERIES = Tiles(queries=64, keys=32, warps=4, stages=2)
BACKWARD_KEYS = Tiles(queries=32, keys=64, warps=4, stages=2)
"""They fit 99 KiB of shared memory, the least that GPUs from capability 8.0 on have; timed on an H200 only."""
SINGLE_PRECISION = Tiles(queries=32, keys=32, warps=4, stages=1)
"""For fp32 inputs, whose tiles take twice the shared memory; for tests, not for speed."""


def attend_ranges(q: Tensor, k: Tensor, v: Tensor, first_key: Tensor, end_query: Tensor, *, scale: float) -> Tensor:
    """q (B, T, H, D), k and v (B, T, H_kv, D) -> (B, T, H, D) in q's dtype. T a multiple of 128, D 64 or 128.

    first_key, end_query (B or 1, T) int32, never falling along T: query q sees the keys first_key[q] .. q, which is to
    say that key k is seen by the queries k .. end_query[k] - 1."""
    check_heads(q.size(1), q.size(3))
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q is {q.dtype}, k {k.dtype}, v {v.dtype}, but their products need one format")
    out, _ = attend_forward(q, k, v, first_key, end_query, scale)
    return out


def check_heads(tokens: int, width: int) -> None:
    if tokens % BLOCK_TOKENS or width not in WIDTHS:
        raise ValueError(
            f"{tokens:,} tokens with heads of {width}: the kernels cut sequences into blocks of {BLOCK_TOKENS} tokens "
            f"and know heads of {' and '.join(map(str, WIDTHS))}; use --attention.backend flex"
        )


@triton.jit
def tile_at(source, row, column, stride, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Pointers to the (ROWS, WIDTH) elements from (row, column) on of a matrix with this row stride."""
    offsets = tl.arange(0, ROWS)[:, None] * stride + tl.arange(0, WIDTH)[None, :]
    return source + (row.to(tl.int64) * stride + column) + offsets


@triton.jit
def attention_forward(
    q, k, v, out, lse_ptr, first_ptr, scale_log2, tokens, range_stride, q_stride, k_stride, v_stride, out_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One query tile of one head: its outputs, and log2 of its softmax sums for the backward pass."""
    start = tl.program_id(0) * BLOCK_M
    batch, head = tl.program_id(1) // HEADS, tl.program_id(1) % HEADS
    row, column = batch * tokens, head // GROUP * WIDTH
    first_ptr += batch.to(tl.int64) * range_stride
    queries = start + tl.arange(0, BLOCK_M)
    first = tl.load(first_ptr + queries)
    begin = tl.load(first_ptr + start) // BLOCK_N * BLOCK_N
    full_end = (start + 1) // BLOCK_N * BLOCK_N  # from here on, keys later than the tile's first query
    full_begin = (tl.load(first_ptr + start + BLOCK_M - 1) + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    full_begin = tl.minimum(full_begin, full_end)
    end = start + BLOCK_M
    q_tile = tl.load(tile_at(q, row + start, head * WIDTH, q_stride, BLOCK_M, WIDTH))
    acc = tl.zeros((BLOCK_M, WIDTH), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    largest = tl.full((BLOCK_M,), LOWEST, tl.float32)
    for begin_keys in range(begin, end, BLOCK_N):
        k_tile = tl.load(tile_at(k, row + begin_keys, column, k_stride, BLOCK_N, WIDTH))
        s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        if (begin_keys < full_begin) | (begin_keys >= full_end):
            keys = begin_keys + tl.arange(0, BLOCK_N)
            s = tl.where((keys[None, :] >= first[:, None]) & (keys[None, :] <= queries[:, None]), s, HIDDEN)
        new = tl.maximum(largest, tl.max(s, 1) * scale_log2)
        p = tl.exp2(s * scale_log2 - new[:, None])
        shrink = tl.exp2(largest - new)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        v_tile = tl.load(tile_at(v, row + begin_keys, column, v_stride, BLOCK_N, WIDTH))
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision=PRECISION)
        largest = new
    tl.store(lse_ptr + tl.program_id(1).to(tl.int64) * tokens + queries, largest + tl.log2(total))
    tile = (acc / total[:, None]).to(q_tile.dtype)
    tl.store(tile_at(out, row + start, head * WIDTH, out_stride, BLOCK_M, WIDTH), tile)


@triton.jit
def attention_query_gradient(
    q, k, v, out, grad, grad_q, lse_ptr, delta_ptr, first_ptr, scale, scale_log2, tokens, range_stride, q_stride,
    k_stride, v_stride, out_stride, grad_stride, grad_q_stride, HEADS: tl.constexpr, GROUP: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One query tile of one head: its delta = sum(out * grad) by row, and its gradient."""
    start = tl.program_id(0) * BLOCK_M
    batch, head = tl.program_id(1) // HEADS, tl.program_id(1) % HEADS
    row, column = batch * tokens, head // GROUP * WIDTH
    first_ptr += batch.to(tl.int64) * range_stride
    queries = start + tl.arange(0, BLOCK_M)
    first = tl.load(first_ptr + queries)
    begin = tl.load(first_ptr + start) // BLOCK_N * BLOCK_N
    full_end = (start + 1) // BLOCK_N * BLOCK_N
    full_begin = (tl.load(first_ptr + start + BLOCK_M - 1) + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    full_begin = tl.minimum(full_begin, full_end)
    end = start + BLOCK_M
    by_row = tl.program_id(1).to(tl.int64) * tokens + queries
    out_tile = tl.load(tile_at(out, row + start, head * WIDTH, out_stride, BLOCK_M, WIDTH))
    grad_tile = tl.load(tile_at(grad, row + start, head * WIDTH, grad_stride, BLOCK_M, WIDTH))
    delta = tl.sum(out_tile.to(tl.float32) * grad_tile.to(tl.float32), 1)
    tl.store(delta_ptr + by_row, delta)
    lse = tl.load(lse_ptr + by_row)
    q_tile = tl.load(tile_at(q, row + start, head * WIDTH, q_stride, BLOCK_M, WIDTH))
    acc = tl.zeros((BLOCK_M, WIDTH), tl.float32)
    for begin_keys in range(begin, end, BLOCK_N):
        k_tile = tl.load(tile_at(k, row + begin_keys, column, k_stride, BLOCK_N, WIDTH))
        v_tile = tl.load(tile_at(v, row + begin_keys, column, v_stride, BLOCK_N, WIDTH))
        s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        dp = tl.dot(grad_tile, tl.trans(v_tile), input_precision=PRECISION)
        p = tl.exp2(s * scale_log2 - lse[:, None])
        if (begin_keys < full_begin) | (begin_keys >= full_end):
            keys = begin_keys + tl.arange(0, BLOCK_N)
            p = tl.where((keys[None, :] >= first[:, None]) & (keys[None, :] <= queries[:, None]), p, 0.0)
        ds = p * (dp - delta[:, None])
        acc = tl.dot(ds.to(k_tile.dtype), k_tile, acc, input_precision=PRECISION)
    acc *= scale
    tl.store(tile_at(grad_q, row + start, head * WIDTH, grad_q_stride, BLOCK_M, WIDTH), acc.to(q_tile.dtype))


@triton.jit
def attention_key_gradient(
    q, k, v, grad, grad_k, grad_v, lse_ptr, delta_ptr, end_ptr, scale, scale_log2, tokens, range_stride, q_stride,
    k_stride, v_stride, grad_stride, grad_k_stride, grad_v_stride, HEADS: tl.constexpr, GROUP: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One key tile of one key head: the gradients of its keys and values over all query heads of the group.
    Scores are kept transposed, keys by queries, so that the weights are operands straight from registers."""
    KV_HEADS: tl.constexpr = HEADS // GROUP
    start = tl.program_id(0) * BLOCK_N
    batch, kv_head = tl.program_id(1) // KV_HEADS, tl.program_id(1) % KV_HEADS
    row, column = batch * tokens, kv_head * WIDTH
    end_ptr += batch.to(tl.int64) * range_stride
    keys = start + tl.arange(0, BLOCK_N)
    end_query = tl.load(end_ptr + keys)
    begin = start // BLOCK_M * BLOCK_M
    end = tl.load(end_ptr + start + BLOCK_N - 1)
    full_begin = (start + BLOCK_N - 1 + BLOCK_M - 1) // BLOCK_M * BLOCK_M  # from here on, no query before a key
    full_end = tl.maximum(tl.load(end_ptr + start) // BLOCK_M * BLOCK_M, full_begin)
    k_tile = tl.load(tile_at(k, row + start, column, k_stride, BLOCK_N, WIDTH))
    v_tile = tl.load(tile_at(v, row + start, column, v_stride, BLOCK_N, WIDTH))
    acc_k = tl.zeros((BLOCK_N, WIDTH), tl.float32)
    acc_v = tl.zeros((BLOCK_N, WIDTH), tl.float32)
    for member in range(GROUP):
        head = kv_head * GROUP + member
        by_row = (batch * HEADS + head).to(tl.int64) * tokens
        for begin_queries in range(begin, end, BLOCK_M):
            queries = begin_queries + tl.arange(0, BLOCK_M)
            q_tile = tl.load(tile_at(q, row + begin_queries, head * WIDTH, q_stride, BLOCK_M, WIDTH))
            grad_tile = tl.load(tile_at(grad, row + begin_queries, head * WIDTH, grad_stride, BLOCK_M, WIDTH))
            lse = tl.load(lse_ptr + by_row + queries)
            delta = tl.load(delta_ptr + by_row + queries)
            s = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION)
            p = tl.exp2(s * scale_log2 - lse[None, :])
            if (begin_queries < full_begin) | (begin_queries >= full_end):
                p = tl.where((queries[None, :] >= keys[:, None]) & (queries[None, :] < end_query[:, None]), p, 0.0)
            acc_v = tl.dot(p.to(grad_tile.dtype), grad_tile, acc_v, input_precision=PRECISION)
            dp = tl.dot(v_tile, tl.trans(grad_tile), input_precision=PRECISION)
            ds = (p * (dp - delta[None, :])).to(q_tile.dtype)
            acc_k = tl.dot(ds, q_tile, acc_k, input_precision=PRECISION)
    acc_k *= scale
    tl.store(tile_at(grad_k, row + start, column, grad_k_stride, BLOCK_N, WIDTH), acc_k.to(k_tile.dtype))
    tl.store(tile_at(grad_v, row + start, column, grad_v_stride, BLOCK_N, WIDTH), acc_v.to(v_tile.dtype))


def as_rows(x: Tensor) -> Tensor:
    """(B, T, H, D) as the matrix (B * T, H * D) that tiles are cut from; a copy where strides or alignment forbid the
    view (copies by hardware want 16 bytes)."""
    batch, tokens, heads, width = x.shape
    viewable = x.stride(3) == 1 and x.stride(2) == width and (batch == 1 or x.stride(0) == tokens * x.stride(1))
    aligned = x.data_ptr() % 16 == 0 and x.stride(1) * x.element_size() % 16 == 0
    if not (viewable and aligned):
        x = x.contiguous()
    return x.as_strided((batch * tokens, heads * width), (x.stride(1), 1))


def constants(q: Tensor, k: Tensor, tiles: Tiles) -> dict[str, Any]:
    """What kernels of this file and of `attention_async` are compiled for."""
    found: dict[str, Any] = {"HEADS": q.size(2), "GROUP": q.size(2) // k.size(2), "WIDTH": q.size(3)}
    found |= {"BLOCK_M": tiles.queries, "BLOCK_N": tiles.keys, "num_warps": tiles.warps}
    return found if tiles.registers is None else found | {"maxnreg": tiles.registers}


def _options(q: Tensor, k: Tensor, tiles: Tiles) -> dict[str, Any]:
    precision = "ieee" if q.dtype == torch.float32 else "tf32"  # only read for fp32 operands
    return constants(q, k, tiles) | {"PRECISION": precision, "num_stages": tiles.stages}


def launch_forward(
    q: Tensor, k: Tensor, v: Tensor, first_key: Tensor, scale: float, tiles: Tiles
) -> tuple[Tensor, Tensor]:
    """Outputs, and log2 of the softmax sums, (B, H, T) fp32."""
    batch, tokens, heads, _ = q.shape
    out, lse = q.new_empty(q.shape), q.new_empty((batch, heads, tokens), dtype=torch.float32)
    rows = [as_rows(x) for x in (q, k, v, out)]
    stride = tokens if first_key.size(0) > 1 else 0
    numbers = (scale * LOG2_E, tokens, stride, *(x.stride(0) for x in rows))
    grid = (tokens // tiles.queries, batch * heads)
    attention_forward[grid](*rows, lse, first_key, *numbers, **_options(q, k, tiles))
    return out, lse


def launch_query_gradient(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, first_key: Tensor, scale: float,
    tiles: Tiles, grad_q: Tensor,
) -> Tensor:  # fmt: skip
    """Fill grad_q, (B, T, H, D). Returns delta (B, H, T) fp32 for the other kernel."""
    batch, tokens, heads, _ = q.shape
    delta = torch.empty_like(lse)
    rows = [as_rows(x) for x in (q, k, v, out, grad, grad_q)]
    stride = tokens if first_key.size(0) > 1 else 0
    numbers = (scale, scale * LOG2_E, tokens, stride, *(x.stride(0) for x in rows))
    grid = (tokens // tiles.queries, batch * heads)
    attention_query_gradient[grid](*rows, lse, delta, first_key, *numbers, **_options(q, k, tiles))
    return delta


def launch_key_gradient(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, end_query: Tensor, scale: float,
    tiles: Tiles, grad_k: Tensor, grad_v: Tensor,
) -> None:  # fmt: skip
    """Fill grad_k and grad_v, (B, T, H_kv, D)."""
    batch, tokens, kv_heads, _ = k.shape
    rows = [as_rows(x) for x in (q, k, v, grad, grad_k, grad_v)]
    stride = tokens if end_query.size(0) > 1 else 0
    numbers = (scale, scale * LOG2_E, tokens, stride, *(x.stride(0) for x in rows))
    grid = (tokens // tiles.keys, batch * kv_heads)
    attention_key_gradient[grid](*rows, lse, delta, end_query, *numbers, **_options(q, k, tiles))


def _tiles(tiles: Tiles, q: Tensor) -> Tiles:
    return SINGLE_PRECISION if q.dtype == torch.float32 else tiles


@torch.library.custom_op("paceline::attend_ranges", mutates_args=())
def attend_forward(
    q: Tensor, k: Tensor, v: Tensor, first_key: Tensor, end_query: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Outputs and log2 of the softmax sums; end_query is kept for the backward pass."""
    if in_flight(q):
        from paceline.kernels import attention_async as kernels

        return kernels.launch_forward(q, k, v, first_key, scale, kernels.FORWARD)
    return launch_forward(q, k, v, first_key, scale, _tiles(FORWARD, q))


def in_flight(q: Tensor) -> bool:
    """Whether the kernels in Gluon take these, which keep products in flight: half precision on Hopper."""
    return q.is_cuda and q.dtype != torch.float32 and torch.cuda.get_device_capability(q.device)[0] == HOPPER


@torch.library.custom_op("paceline::attend_ranges_backward", mutates_args=())
def attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, first_key: Tensor, end_query: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and v, by both kernels."""
    grad_q, grad_k, grad_v = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    if in_flight(q):
        from paceline.kernels.attention_async import fill_gradients

        fill_gradients((grad_q, grad_k, grad_v), grad, q, k, v, out, lse, first_key, end_query, scale)
    else:
        tiles = _tiles(BACKWARD_QUERIES, q)
        delta = launch_query_gradient(grad, q, k, v, out, lse, first_key, scale, tiles, grad_q)
        launch_key_gradient(grad, q, k, v, lse, delta, end_query, scale, _tiles(BACKWARD_KEYS, q), grad_k, grad_v)
    return grad_q, grad_k, grad_v


@attend_forward.register_fake
def _(q, k, v, first_key, end_query, scale):
    batch, tokens, heads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((batch, heads, tokens), dtype=torch.float32)


@attend_backward.register_fake
def _(grad, q, k, v, out, lse, first_key, end_query, scale):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx, inputs, output) -> None:
    q, k, v, first_key, end_query, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, *output, first_key, end_query)


def _backward(ctx, grad, _grad_lse):
    return *attend_backward(grad, *ctx.saved_tensors, ctx.scale), None, None, None


attend_forward.register_autograd(_backward, setup_context=_keep)
