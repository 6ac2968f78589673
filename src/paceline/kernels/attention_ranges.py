"""Attention of queries that see one interval of keys, for a GPU with Triton. The plain twin is `attend_dense`.

A causal mask within documents and a window lets query q see exactly the keys first_key[q] .. q, and first_key never
falls along a sequence. So two integers per token say all: which tiles are visited, which of them need no element test,
and the test itself; the other direction, key k seen by the queries k .. end_query[k] - 1, serves the backward pass.
There are no lists of blocks, and nothing here knows of documents or windows.

Softmax is in base 2 with running maxima, sums in fp32. Backward takes two kernels, by query tile (which also leaves
sum(o * do) for the other) and by key tile; each forms the probabilities anew: 7 products where 5 would do, but every
sum has a fixed order. One layer of record 18 on an H200, window of 7 blocks: 0.31 ms forward and 0.92 ms backward,
where FlexAttention takes 0.46 and 1.22 (docs/experiments.md). On a Hopper GPU and in bf16, `attention_async` takes the
place of these kernels; they are what it is judged by.

Tried and dropped: one backward kernel with the 5 products, which adds query gradients atomically (1.3 ms); a loop each
for tiles with and without an element test (the pipeline drains between them); the scores of the next tile ahead of this
one's softmax (the compiler waits for them at once, and they cost 50 registers); Triton's warp specialization (wants
descriptors made on the device, no branch in the loop).
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from paceline.core.units import BLOCK_TOKENS
from paceline.kernels.heads_fused import halves, load_angles, raw_gradient

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
    tma: bool = True
    """Load and store by tensor descriptors; else by pointers."""
    registers: int | None = None
    """Most registers of a thread; None leaves that to the compiler."""


FORWARD = Tiles(queries=64, keys=64, warps=4, stages=3)
BACKWARD_QUERIES = Tiles(queries=128, keys=32, warps=8, stages=3)
BACKWARD_KEYS = Tiles(queries=64, keys=64, warps=4, stages=2)
"""The fastest for heads of 128 (benchmarks/attention_tuning.py). Heads of 64 take the same, unmeasured: they need half
the shared memory, so what fits the one fits the other."""
RAW_QUERIES = Tiles(queries=64, keys=64, warps=4, stages=2)
RAW_KEYS = Tiles(queries=32, keys=64, warps=4, stages=3)
"""The same with endings that carry gradients on to the projections, which take registers."""
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
def load_tile(source, row, column, stride, ROWS: tl.constexpr, WIDTH: tl.constexpr, TMA: tl.constexpr):
    """(ROWS, WIDTH) from (row, column) of a matrix: a descriptor, or a pointer with its row stride."""
    if TMA:
        tile = source.load([row, column])
    else:
        offsets = tl.arange(0, ROWS)[:, None] * stride + tl.arange(0, WIDTH)[None, :]
        tile = tl.load(source + (row.to(tl.int64) * stride + column) + offsets)
    return tile


@triton.jit
def store_tile(target, row, column, stride, tile, ROWS: tl.constexpr, WIDTH: tl.constexpr, TMA: tl.constexpr):
    if TMA:
        target.store([row, column], tile)
    else:
        offsets = tl.arange(0, ROWS)[:, None] * stride + tl.arange(0, WIDTH)[None, :]
        tl.store(target + (row.to(tl.int64) * stride + column) + offsets, tile)


@triton.jit
def store_raw(
    target,
    grad,  # (ROWS, WIDTH) fp32, of queries or keys
    kept,  # those queries or keys: descriptor or pointer
    row,
    position,
    column,
    head,  # among queries' and keys'
    target_stride,
    kept_stride,
    cos_ptr,
    sin_ptr,
    norm_ptr,
    NORMS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    PAIRS: tl.constexpr,
    TMA: tl.constexpr,
):
    """Store the gradient of the raw projection: through rotary and norm back. `norm` (rows, NORMS) fp32."""
    HALF: tl.constexpr = WIDTH // 2
    rows = tl.arange(0, ROWS)
    tile = load_tile(kept, row, column, kept_stride, ROWS, WIDTH, TMA)
    a, b = halves(tile.to(tl.float32), ROWS, HALF)
    grad_a, grad_b = halves(grad, ROWS, HALF)
    norm = tl.load(norm_ptr + (row + rows).to(tl.int64) * NORMS + head)
    pair = tl.arange(0, HALF)[None, :]
    cos, sin = load_angles(cos_ptr, sin_ptr, (position + rows)[:, None], pair, pair < HALF, PAIRS)
    raw_a, raw_b = raw_gradient(grad_a, grad_b, a, b, norm, cos, sin, HALF)
    store_tile(target, row, column, target_stride, raw_a.to(tile.dtype), ROWS, HALF, TMA)
    store_tile(target, row, column + HALF, target_stride, raw_b.to(tile.dtype), ROWS, HALF, TMA)


@triton.jit
def attention_forward(
    q,
    k,
    v,
    out,
    lse_ptr,
    first_ptr,
    scale_log2,
    tokens,
    range_stride,
    q_stride,
    k_stride,
    v_stride,
    out_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
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
    q_tile = load_tile(q, row + start, head * WIDTH, q_stride, BLOCK_M, WIDTH, TMA)
    acc = tl.zeros((BLOCK_M, WIDTH), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    largest = tl.full((BLOCK_M,), LOWEST, tl.float32)
    for begin_keys in range(begin, end, BLOCK_N):
        k_tile = load_tile(k, row + begin_keys, column, k_stride, BLOCK_N, WIDTH, TMA)
        s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        if (begin_keys < full_begin) | (begin_keys >= full_end):
            keys = begin_keys + tl.arange(0, BLOCK_N)
            s = tl.where((keys[None, :] >= first[:, None]) & (keys[None, :] <= queries[:, None]), s, HIDDEN)
        new = tl.maximum(largest, tl.max(s, 1) * scale_log2)
        p = tl.exp2(s * scale_log2 - new[:, None])
        shrink = tl.exp2(largest - new)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        v_tile = load_tile(v, row + begin_keys, column, v_stride, BLOCK_N, WIDTH, TMA)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision=PRECISION)
        largest = new
    tl.store(lse_ptr + tl.program_id(1).to(tl.int64) * tokens + queries, largest + tl.log2(total))
    tile = (acc / total[:, None]).to(q_tile.dtype)
    store_tile(out, row + start, head * WIDTH, out_stride, tile, BLOCK_M, WIDTH, TMA)


@triton.jit
def attention_query_gradient(
    q,
    k,
    v,
    out,
    grad,
    grad_q,
    lse_ptr,
    delta_ptr,
    first_ptr,
    scale,
    scale_log2,
    tokens,
    range_stride,
    q_stride,
    k_stride,
    v_stride,
    out_stride,
    grad_stride,
    grad_q_stride,
    cos_ptr,
    sin_ptr,
    norm_ptr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    RAW: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """One query tile of one head: its delta = sum(out * grad) by row, and its gradient; RAW: that of the projection
    which was normalised and turned to give q."""
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
    out_tile = load_tile(out, row + start, head * WIDTH, out_stride, BLOCK_M, WIDTH, TMA)
    grad_tile = load_tile(grad, row + start, head * WIDTH, grad_stride, BLOCK_M, WIDTH, TMA)
    delta = tl.sum(out_tile.to(tl.float32) * grad_tile.to(tl.float32), 1)
    tl.store(delta_ptr + by_row, delta)
    lse = tl.load(lse_ptr + by_row)
    q_tile = load_tile(q, row + start, head * WIDTH, q_stride, BLOCK_M, WIDTH, TMA)
    acc = tl.zeros((BLOCK_M, WIDTH), tl.float32)
    for begin_keys in range(begin, end, BLOCK_N):
        k_tile = load_tile(k, row + begin_keys, column, k_stride, BLOCK_N, WIDTH, TMA)
        v_tile = load_tile(v, row + begin_keys, column, v_stride, BLOCK_N, WIDTH, TMA)
        s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        dp = tl.dot(grad_tile, tl.trans(v_tile), input_precision=PRECISION)
        p = tl.exp2(s * scale_log2 - lse[:, None])
        if (begin_keys < full_begin) | (begin_keys >= full_end):
            keys = begin_keys + tl.arange(0, BLOCK_N)
            p = tl.where((keys[None, :] >= first[:, None]) & (keys[None, :] <= queries[:, None]), p, 0.0)
        ds = p * (dp - delta[:, None])
        acc = tl.dot(ds.to(k_tile.dtype), k_tile, acc, input_precision=PRECISION)
    acc *= scale
    if RAW:
        store_raw(
            grad_q, acc, q, row + start, start, head * WIDTH, head, grad_q_stride, q_stride, cos_ptr, sin_ptr, norm_ptr,
            HEADS + HEADS // GROUP, BLOCK_M, WIDTH, PAIRS, TMA,
        )  # fmt: skip
    else:
        store_tile(grad_q, row + start, head * WIDTH, grad_q_stride, acc.to(q_tile.dtype), BLOCK_M, WIDTH, TMA)


@triton.jit
def attention_key_gradient(
    q,
    k,
    v,
    grad,
    grad_k,
    grad_v,
    lse_ptr,
    delta_ptr,
    end_ptr,
    scale,
    scale_log2,
    tokens,
    range_stride,
    q_stride,
    k_stride,
    v_stride,
    grad_stride,
    grad_k_stride,
    grad_v_stride,
    cos_ptr,
    sin_ptr,
    norm_ptr,
    own,
    extra,
    grad_extra,
    own_stride,
    mix_ptr,
    parts_ptr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    RAW: tl.constexpr,
    PAIRS: tl.constexpr,
    MIXED: tl.constexpr,
    EXTRA: tl.constexpr,
):
    """One key tile of one key head: the gradients of its keys and values over all query heads of the group.
    Scores are kept transposed, keys by queries, so that the weights are operands straight from registers.
    RAW: the gradients of the projections which were normalised and turned to give k, and MIXED to give v; each program
    leaves its part of the mixing scalars' gradient in its row of `parts`, to be summed in a fixed order."""
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
    k_tile = load_tile(k, row + start, column, k_stride, BLOCK_N, WIDTH, TMA)
    v_tile = load_tile(v, row + start, column, v_stride, BLOCK_N, WIDTH, TMA)
    acc_k = tl.zeros((BLOCK_N, WIDTH), tl.float32)
    acc_v = tl.zeros((BLOCK_N, WIDTH), tl.float32)
    for member in range(GROUP):
        head = kv_head * GROUP + member
        by_row = (batch * HEADS + head).to(tl.int64) * tokens
        for begin_queries in range(begin, end, BLOCK_M):
            queries = begin_queries + tl.arange(0, BLOCK_M)
            q_tile = load_tile(q, row + begin_queries, head * WIDTH, q_stride, BLOCK_M, WIDTH, TMA)
            grad_tile = load_tile(grad, row + begin_queries, head * WIDTH, grad_stride, BLOCK_M, WIDTH, TMA)
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
    if RAW:
        store_raw(
            grad_k, acc_k, k, row + start, start, column, HEADS + kv_head, grad_k_stride, k_stride, cos_ptr, sin_ptr,
            norm_ptr, HEADS + KV_HEADS, BLOCK_N, WIDTH, PAIRS, TMA,
        )  # fmt: skip
        parts_ptr += (tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)) * 2
        if EXTRA:
            extra_tile = load_tile(extra, row + start, column, KV_HEADS * WIDTH, BLOCK_N, WIDTH, TMA)
            tl.store(parts_ptr + 1, tl.sum(acc_v * extra_tile.to(tl.float32)))
            tile = (acc_v * tl.load(mix_ptr + 1).to(tl.float32)).to(v_tile.dtype)
            store_tile(grad_extra, row + start, column, KV_HEADS * WIDTH, tile, BLOCK_N, WIDTH, TMA)
        if MIXED:
            own_tile = load_tile(own, row + start, column, own_stride, BLOCK_N, WIDTH, TMA)
            tl.store(parts_ptr, tl.sum(acc_v * own_tile.to(tl.float32)))
            acc_v *= tl.load(mix_ptr).to(tl.float32)
    else:
        store_tile(grad_k, row + start, column, grad_k_stride, acc_k.to(k_tile.dtype), BLOCK_N, WIDTH, TMA)
    store_tile(grad_v, row + start, column, grad_v_stride, acc_v.to(v_tile.dtype), BLOCK_N, WIDTH, TMA)


def as_rows(x: Tensor) -> Tensor:
    """(B, T, H, D) as the matrix (B * T, H * D) that tiles are cut from; a copy where strides or alignment forbid the
    view (descriptors want 16 bytes)."""
    batch, tokens, heads, width = x.shape
    viewable = x.stride(3) == 1 and x.stride(2) == width and (batch == 1 or x.stride(0) == tokens * x.stride(1))
    aligned = x.data_ptr() % 16 == 0 and x.stride(1) * x.element_size() % 16 == 0
    if not (viewable and aligned):
        x = x.contiguous()
    return x.as_strided((batch * tokens, heads * width), (x.stride(1), 1))


def _argument(rows: Tensor, block: int, width: int, *, tma: bool) -> Any:
    return TensorDescriptor.from_tensor(rows, [block, width]) if tma else rows


def _options(tiles: Tiles) -> dict[str, Any]:
    options: dict[str, Any] = {"num_warps": tiles.warps, "num_stages": tiles.stages, "TMA": tiles.tma}
    return options if tiles.registers is None else options | {"maxnreg": tiles.registers}


def _shape_constants(q: Tensor, k: Tensor) -> dict[str, Any]:
    precision = "ieee" if q.dtype == torch.float32 else "tf32"  # only read for fp32 operands
    return {"HEADS": q.size(2), "GROUP": q.size(2) // k.size(2), "WIDTH": q.size(3), "PRECISION": precision}


def launch_forward(
    q: Tensor, k: Tensor, v: Tensor, first_key: Tensor, scale: float, tiles: Tiles
) -> tuple[Tensor, Tensor]:
    """Outputs, and log2 of the softmax sums, (B, H, T) fp32."""
    batch, tokens, heads, width = q.shape
    out, lse = q.new_empty(q.shape), q.new_empty((batch, heads, tokens), dtype=torch.float32)
    rows = [as_rows(x) for x in (q, k, v, out)]
    blocks = (tiles.queries, tiles.keys, tiles.keys, tiles.queries)
    attention_forward[(tokens // tiles.queries, batch * heads)](
        *(_argument(x, block, width, tma=tiles.tma) for x, block in zip(rows, blocks, strict=True)),
        lse,
        first_key,
        scale * LOG2_E,
        tokens,
        tokens if first_key.size(0) > 1 else 0,
        *(x.stride(0) for x in rows),
        BLOCK_M=tiles.queries,
        BLOCK_N=tiles.keys,
        **_shape_constants(q, k),
        **_options(tiles),
    )
    return out, lse


@dataclass(frozen=True)
class Raw:
    """For gradients of the projections that gave q, k and v, instead of those of q, k and v (`heads_fused`)."""

    cos: Tensor
    sin: Tensor
    norm: Tensor
    """Scales of the norms, (N, H + H_kv) fp32."""
    own: Tensor
    """Values before they were mixed, (N, H_kv, D), a part of the joined projection."""
    mix: Tensor | None
    extra: Tensor | None
    grad_extra: Tensor
    parts: Tensor
    """(key tiles x key heads, 2) fp32, to be filled: parts of the gradient of `mix`."""


def launch_query_gradient(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    first_key: Tensor,
    scale: float,
    tiles: Tiles,
    grad_q: Tensor,
    raw: Raw | None = None,
) -> Tensor:
    """Fill grad_q, (B, T, H, D), with the gradient of q, or by `raw`. Returns delta (B, H, T) fp32 for the other."""
    batch, tokens, heads, width = q.shape
    delta = torch.empty_like(lse)
    rows = [as_rows(x) for x in (q, k, v, out, grad, grad_q)]
    m, n = tiles.queries, tiles.keys
    stored = width if raw is None else width // 2
    blocks = ((m, width), (n, width), (n, width), (m, width), (m, width), (m, stored))
    attention_query_gradient[(tokens // m, batch * heads)](
        *(_argument(x, *block, tma=tiles.tma) for x, block in zip(rows, blocks, strict=True)),
        lse,
        delta,
        first_key,
        scale,
        scale * LOG2_E,
        tokens,
        tokens if first_key.size(0) > 1 else 0,
        *(x.stride(0) for x in rows),
        *((lse, lse, lse) if raw is None else (raw.cos, raw.sin, raw.norm)),
        BLOCK_M=m,
        BLOCK_N=n,
        RAW=raw is not None,
        PAIRS=0 if raw is None else raw.cos.size(1),
        **_shape_constants(q, k),
        **_options(tiles),
    )
    return delta


def launch_key_gradient(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    end_query: Tensor,
    scale: float,
    tiles: Tiles,
    grad_k: Tensor,
    grad_v: Tensor,
    raw: Raw | None = None,
) -> None:
    """Fill grad_k and grad_v, (B, T, H_kv, D), with the gradients of k and v, or by `raw`."""
    batch, tokens, kv_heads, width = k.shape
    rows = [as_rows(x) for x in (q, k, v, grad, grad_k, grad_v)]
    m, n = tiles.queries, tiles.keys
    stored = width if raw is None else width // 2
    blocks = ((m, width), (n, width), (n, width), (m, width), (n, stored), (n, width))
    attention_key_gradient[(tokens // n, batch * kv_heads)](
        *(_argument(x, *block, tma=tiles.tma) for x, block in zip(rows, blocks, strict=True)),
        lse,
        delta,
        end_query,
        scale,
        scale * LOG2_E,
        tokens,
        tokens if end_query.size(0) > 1 else 0,
        *(x.stride(0) for x in rows),
        *_key_raw_arguments(raw, lse, n, width, tma=tiles.tma),
        BLOCK_M=m,
        BLOCK_N=n,
        RAW=raw is not None,
        PAIRS=0 if raw is None else raw.cos.size(1),
        MIXED=raw is not None and raw.mix is not None,
        EXTRA=raw is not None and raw.extra is not None,
        **_shape_constants(q, k),
        **_options(tiles),
    )


def _key_raw_arguments(raw: Raw | None, unused: Tensor, keys: int, width: int, *, tma: bool) -> list[Any]:
    """`unused` stands for what the kernel does not read."""
    if raw is None:
        return [*[unused] * 6, 0, unused, unused]
    values = (
        unused if raw.mix is None else raw.own,
        unused if raw.extra is None else raw.extra,
        unused if raw.extra is None else raw.grad_extra,
    )
    rows = (x if x is unused else _argument(as_rows(x[None]), keys, width, tma=tma) for x in values)
    return [
        raw.cos,
        raw.sin,
        raw.norm,
        *rows,
        raw.own.stride(0),
        unused if raw.mix is None else raw.mix,
        raw.parts,
    ]


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
    """Whether the kernels in Gluon take these, which keep products in flight: not fp32, and nothing interpreted."""
    return q.is_cuda and q.dtype != torch.float32


@torch.library.custom_op("paceline::attend_ranges_backward", mutates_args=())
def attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    first_key: Tensor,
    end_query: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    grads = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    fill_gradients(grads, grad, q, k, v, out, lse, first_key, end_query, scale)
    return grads


def fill_gradients(
    grads: tuple[Tensor, Tensor, Tensor],
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    first_key: Tensor,
    end_query: Tensor,
    scale: float,
    raw: Raw | None = None,
) -> None:
    """Both kernels. `grads` take the gradients of q, k and v, or by `raw` those of their projections."""
    if in_flight(q):
        from paceline.kernels import attention_async as kernels

        tiles = kernels.BACKWARD_QUERIES
        delta = kernels.launch_query_gradient(grad, q, k, v, out, lse, first_key, scale, tiles, grads[0], raw)
        tiles = kernels.BACKWARD_KEYS
        kernels.launch_key_gradient(grad, q, k, v, lse, delta, end_query, scale, tiles, *grads[1:], raw)
        return
    by_query, by_key = (BACKWARD_QUERIES, BACKWARD_KEYS) if raw is None else (RAW_QUERIES, RAW_KEYS)
    tiles = _tiles(by_query, q)
    delta = launch_query_gradient(grad, q, k, v, out, lse, first_key, scale, tiles, grads[0], raw)
    launch_key_gradient(grad, q, k, v, lse, delta, end_query, scale, _tiles(by_key, q), *grads[1:], raw)


def raw_parts(q: Tensor, kv_heads: int) -> Tensor:
    """`Raw.parts` for queries (N, ...)."""
    tiles = _tiles(RAW_KEYS, q)
    if in_flight(q):
        from paceline.kernels import attention_async as kernels

        tiles = kernels.BACKWARD_KEYS
    return q.new_zeros(q.size(0) // tiles.keys * kv_heads, 2, dtype=torch.float32)


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


def _differentiate(ctx, grad, _grad_lse):
    return *attend_backward(grad, *ctx.saved_tensors, ctx.scale), None, None, None


attend_forward.register_autograd(_differentiate, setup_context=_keep)
