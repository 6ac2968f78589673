"""Products whose ending runs beside the next tile's products, for a Hopper GPU with Gluon: that of the MLP's backward
pass, and that of the head, which ends in slopes of the loss and sums of exponentials. Plain twins: product, then
ending.

One warp orders operands into a ring in shared memory, two warp groups multiply from it and take turns at whole tiles:
while one ends its tile and stores it, the other multiplies ("ping-pong"). What an ending reads is fetched while its
tile is multiplied. Where the matrix units wait during the ending, the MLP's 65,536 x 768 x 3,072 take 0.58 ms on an
H200, 0.49 ms here; the head's 16,384 x 768 x 50,304 take 2.03 ms, by the library 1.78 and 1.12 for a pass over logits.
Tried and dropped: warp groups that share each tile; the heads of attention as an ending (docs/experiments.md).
"""

import math
from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from paceline.kernels.gemm_epilogue import Tiles
from paceline.kernels.gluon_tiles import accumulator, barriers, halves, operand, ring_of

PIECE = gl.constexpr(64)
"""Columns that the copy engine moves at once: 128 bytes, its widest swizzle."""
CONSUMER_REGISTERS, PRODUCER_REGISTERS = gl.constexpr(232), gl.constexpr(40)
"""Per thread. The first warp group gets what is left of 3 x 168, which is 232 too; 384 threads have 168 at first."""
TILES = Tiles(n=128, warps=4)
"""Of one warp group."""
SLOPES_TILES = replace(TILES, group=64)
"""By measurement: 2.03 ms for 16,384 x 768 x 50,304; 2.08 by 32 rows of tiles together, 2.11 by 16, 2.19 by 128."""


@gluon.jit
def place(tile, row_tiles, column_tiles, GROUP: gl.constexpr):
    """Row and column of a tile, counted in tiles: GROUP rows of tiles go together."""
    within = tile % (GROUP * column_tiles)
    first = tile // (GROUP * column_tiles) * GROUP
    height = gl.minimum(row_tiles - first, GROUP)
    return first + within % height, within // height


@gluon.jit
def produce(
    a_desc, b_desc, ring, tiles, depth, B_BY_DEPTH: gl.constexpr, M: gl.constexpr, N: gl.constexpr, K: gl.constexpr,
    STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Order the operands of all tiles, a slot of the ring as soon as it is free."""
    a_ring, b_ring, ready, free = ring
    row_tiles, column_tiles = tiles
    step = 0
    for tile in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
        row, column = place(tile, row_tiles, column_tiles, GROUP)
        for k in range(0, depth, K):
            slot = step % STAGES
            arrived = ready.index(slot)
            mbarrier.wait(free.index(slot), ((step // STAGES) & 1) ^ 1)  # the first round finds all slots free
            mbarrier.expect(arrived, a_desc.block_type.nbytes + b_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(a_desc, [row * M, k], arrived, a_ring.index(slot))
            at = [k, column * N] if B_BY_DEPTH else [column * N, k]
            tma.async_copy_global_to_shared(b_desc, at, arrived, b_ring.index(slot))
            step += 1


@gluon.jit
def multiply(
    number, ring, turn, steps, WHO: gl.constexpr, B_BY_DEPTH: gl.constexpr, M: gl.constexpr, N: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """The products of the program's tile of that `number`. One step is always in flight; the slot before it is freed.

    WHO 0 may begin its n-th tile after the other's tile n - 1, and WHO 1 after the other's tile n."""
    a_ring, b_ring, ready, free = ring
    product = gl.zeros((M, N), gl.float32, accumulator(N, gl.num_warps()))
    mbarrier.wait(turn.index(WHO), (number // 2 + 1 + WHO) & 1)
    first = number * steps
    for step in range(first, first + steps):
        slot = step % STAGES
        mbarrier.wait(ready.index(slot), (step // STAGES) & 1)
        b = b_ring.index(slot) if B_BY_DEPTH else b_ring.index(slot).permute((1, 0))
        begun = warpgroup_mma(a_ring.index(slot), b, product, is_async=True)
        product = warpgroup_mma_wait(1, deps=[begun])
        mbarrier.arrive(free.index((step + STAGES - 1) % STAGES), pred=step > first)
    mbarrier.arrive(turn.index(1 - WHO))
    product = warpgroup_mma_wait(0, deps=[product])
    mbarrier.arrive(free.index((first + steps - 1) % STAGES))
    return product


@gluon.jit
def consume(
    WHO: gl.constexpr, ring, turn, staging, fetched, tiles, depth, c_desc, given, ENDING: gl.constexpr,
    B_BY_DEPTH: gl.constexpr, M: gl.constexpr, N: gl.constexpr, K: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr,
):  # fmt: skip
    """One warp group, WHO 0 or 1: multiply and end every second tile of the program. The ending is `given` what else
    it needs.

    Its part of `staging` takes what the ending reads, then what it writes: free for the next tile as soon as the copy
    engine has read the result."""
    row_tiles, column_tiles = tiles
    steps = gl.cdiv(depth, K)
    count = gl.cdiv(row_tiles * column_tiles - gl.program_id(0), gl.num_programs(0))
    arrived = fetched.index(WHO)
    for number in range(WHO, count, 2):
        tile = gl.program_id(0) + number * gl.num_programs(0)
        row, column = place(tile, row_tiles, column_tiles, GROUP)
        m, n = row * M, column * N
        tma.store_wait(0)  # long done: the other warp group has multiplied since
        if ENDING == "slope":
            fetch(given[0], m, n, staging, arrived, WHO, N)
        product = multiply(number, ring, turn, steps, WHO, B_BY_DEPTH, M, N, STAGES)
        if ENDING == "slope":
            mbarrier.wait(arrived, (number // 2) & 1)
            end_by_slope(product, m, n, staging, c_desc, WHO, M, N)
        else:
            end_by_exponentials(product, m, n, staging, c_desc, given, ENDING == "masked_exponentials", WHO, M, N)
    tma.store_wait(0)


@gluon.jit
def fetch(desc, m, n, staging, arrived, WHO: gl.constexpr, N: gl.constexpr):
    """Order a tile of `desc` into the warp group's part of `staging`."""
    mbarrier.expect(arrived, (N // PIECE) * desc.block_type.nbytes)
    for p in gl.static_range(N // PIECE):
        piece = staging.index(WHO * (N // PIECE) + p)
        tma.async_copy_global_to_shared(desc, [m, n + p * PIECE], arrived, piece)


@gluon.jit
def send(desc, m, n, staging, WHO: gl.constexpr, N: gl.constexpr):
    """Order the warp group's part of `staging`, which its threads have written, to be stored."""
    fence_async_shared()  # what threads wrote must be visible to the copy engine
    for p in gl.static_range(N // PIECE):
        tma.async_copy_shared_to_global(desc, [m, n + p * PIECE], staging.index(WHO * (N // PIECE) + p))


@gluon.jit
def end_by_slope(product, m, n, staging, c_desc, WHO: gl.constexpr, M: gl.constexpr, N: gl.constexpr):
    """z·2·sqrt(kept), from `staging` where the kept values lie, through it into memory."""
    pieces = halves(product, M, N // 2)
    for p in gl.static_range(N // PIECE):
        piece = staging.index(WHO * (N // PIECE) + p)
        z = pieces[p] * (2.0 * gl.sqrt(piece.load(pieces[p].type.layout).to(gl.float32)))
        piece.store(z.to(staging.dtype))
    send(c_desc, m, n, staging, WHO, N)


@gluon.jit
def end_by_exponentials(
    product, m, n, staging, c_desc, given, MASKED: gl.constexpr, WHO: gl.constexpr, M: gl.constexpr, N: gl.constexpr
):
    """Of e = 2^(gain·t), t = tanh(z·bend + lift), these two at bend_ptr: the sum over the tile's columns, one for each
    row; into memory e·(1 - t²). MASKED: the last tile has columns beyond the matrix, which are not summed."""
    sums_ptr, bend_ptr, rows, columns, gain = given
    # loads, so that none of this is moved up: the slot need not wait for it
    t = tanh(gl.load(bend_ptr) * product + gl.load(bend_ptr + 1))
    exponentials = exp2(gain * t)
    pieces = halves(rounded(exponentials - exponentials * t * t), M, N // 2)
    for p in gl.static_range(N // PIECE):
        staging.index(WHO * (N // PIECE) + p).store(pieces[p])
    send(c_desc, m, n, staging, WHO, N)
    layout: gl.constexpr = product.type.layout
    if MASKED:
        column = n + gl.arange(0, N, gl.SliceLayout(0, layout))
        exponentials = gl.where((column < columns)[None, :], exponentials, 0.0)
    row = m + gl.arange(0, M, gl.SliceLayout(1, layout))
    gl.store(sums_ptr + (n // N) * rows + row, gl.sum(exponentials, 1), mask=row < rows)


@gluon.jit
def rounded(x):
    """x in bf16, two values by one instruction. `to` takes them one by one, because they are read one by one later, and
    that instruction waits for the unit of the special functions."""
    how: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;"
    return gl.inline_asm_elementwise(how, "=r,f,f", [x], dtype=gl.bfloat16, is_pure=True, pack=2)


@gluon.jit
def tanh(x):
    """By one instruction, as `head_loss_fused.tanh` with HARDWARE: within 2^-11, relative to it."""
    return gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def exp2(x):
    """By one instruction, within 2^-22; gl.exp2 adds three for arguments below -126."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def run_product(
    a_desc, b_desc, c_desc, tiles, depth, given, ENDING: gl.constexpr, B_BY_DEPTH: gl.constexpr, M: gl.constexpr,
    N: gl.constexpr, K: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Set up shared memory and send the warps to work.

    ready: the slot's operands have arrived. free: its reader has finished. turn: a warp group may multiply. fetched:
    what the ending reads has arrived. One thread arrives for its whole warp group, after its barrier."""
    a_ring, b_ring, staging = ring_of(a_desc, STAGES), ring_of(b_desc, STAGES), ring_of(c_desc, 2 * (N // PIECE))
    ready, free, turn, fetched = barriers(STAGES), barriers(STAGES), barriers(2), barriers(2)
    fence_async_shared()  # the copy engine must see the barriers too
    ring = (a_ring, b_ring, ready, free)
    gl.warp_specialize(
        [
            (consume, (0, ring, turn, staging, fetched, tiles, depth, c_desc, given, ENDING, B_BY_DEPTH, M, N, K,
                       STAGES, GROUP)),
            (consume, (1, ring, turn, staging, fetched, tiles, depth, c_desc, given, ENDING, B_BY_DEPTH, M, N, K,
                       STAGES, GROUP)),
            (produce, (a_desc, b_desc, ring, tiles, depth, B_BY_DEPTH, M, N, K, STAGES, GROUP)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


@gluon.jit
def mlp_slope_product(
    a_desc, b_desc, c_desc, kept_desc, rows, columns, depth, M: gl.constexpr, N: gl.constexpr, K: gl.constexpr,
    STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """c (rows, columns) = a b · 2 sqrt(kept). a (rows, depth), b (depth, columns), kept as c."""
    tiles = (gl.cdiv(rows, M), gl.cdiv(columns, N))
    run_product(a_desc, b_desc, c_desc, tiles, depth, (kept_desc,), "slope", True, M, N, K, STAGES, GROUP)


@gluon.jit
def head_loss_slopes(
    x_desc, weight_desc, slopes_desc, sums_ptr, bend_ptr, rows, columns, depth, gain, MASKED: gl.constexpr,
    M: gl.constexpr, N: gl.constexpr, K: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """For z = x weightᵀ, t = tanh(z·bend + lift) and e = 2^(gain·t): slopes (rows, columns), e·(1 - t²), and sums
    (column tiles, rows), fp32, of e over the columns of each tile. x (rows, depth), weight (columns, depth)."""
    tiles = (gl.cdiv(rows, M), gl.cdiv(columns, N))
    given = (sums_ptr, bend_ptr, rows, columns, gain)
    ENDING: gl.constexpr = "masked_exponentials" if MASKED else "exponentials"
    run_product(x_desc, weight_desc, slopes_desc, tiles, depth, given, ENDING, False, M, N, K, STAGES, GROUP)


def constants(tiles: Tiles) -> dict[str, Any]:
    sizes = {"M": tiles.m, "N": tiles.n, "K": tiles.k, "STAGES": tiles.stages, "GROUP": tiles.group}
    return {**sizes, "num_warps": tiles.warps}


def slope_product(a: Tensor, b: Tensor, kept: Tensor) -> Tensor:
    """a b · 2 sqrt(kept): the gradient a b carried through ReLU², of which `kept` (rows, columns) are the values. a
    (rows, depth), b (depth, columns), all contiguous and in bf16 or fp16."""
    c, t = torch.empty_like(kept), TILES
    ends = (operand(matrix, t.m, PIECE.value) for matrix in (c, kept))
    descs = (operand(a, t.m, t.k), operand(b, t.k, t.n), *ends)
    mlp_slope_product[_programs(a)](*descs, *kept.shape, a.size(1), **constants(t))
    return c


def slopes_and_sums(x: Tensor, weight: Tensor, cap: float, shift: float = 0.0, *, out: Tensor) -> Tensor:
    """For logits z = x weightᵀ and c = cap·tanh((z + shift)/cap): into `out` (rows, columns) exp(c)·dc/dz, and back the
    sums of exp(c) over each 128 columns: (column tiles, rows) in fp32, a row's sums apart but those of 8 rows in one
    sector. x (rows, depth), weight (columns, depth), all in bf16, contiguous, with rows of a multiple of 16 bytes."""
    (rows, depth), columns, t = x.shape, weight.size(0), SLOPES_TILES
    sums = torch.empty(triton.cdiv(columns, t.n), rows, device=x.device)
    bend = torch.full((2,), 1.0 / cap, device=x.device)
    bend[1].fill_(shift / cap)  # a value filled in: a copy would be waited for
    descs = (operand(x, t.m, t.k), operand(weight, t.n, t.k), operand(out, t.m, PIECE.value))
    numbers, masked = (rows, columns, depth, cap * math.log2(math.e)), columns % t.n != 0
    head_loss_slopes[_programs(x)](*descs, sums, bend, *numbers, MASKED=masked, **constants(t))
    return sums


def _programs(tensor: Tensor) -> tuple[int]:
    """One for each multiprocessor."""
    return (torch.cuda.get_device_properties(tensor.device).multi_processor_count,)
