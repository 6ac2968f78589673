"""A matrix product whose ending runs beside the next products, for a Hopper GPU with Gluon. Plain twin: product, then
ending.

One warp orders operands into a ring in shared memory, two warp groups multiply from it. Either they take turns at whole
tiles, so that one ends its tile while the other multiplies ("ping-pong"); or they share each tile, the second a few
steps behind the first: tiles of twice the size ask less of the cache, but only the lag hides the ending. What an ending
reads is fetched while its tile is multiplied. It is for the endings during which the matrix units of `product_fused`
and `heads_fused` wait: 0.58 ms where a simple one takes 0.44, and 0.52 ms where the product alone takes 0.31 (65,536
rows on an H200). Which of the two ways is faster, and by how much, is still to be measured.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from paceline.kernels.heads_fused import Made, Shape

Ending = Literal["none", "relu2", "relu2_backward"]

PIECE = gl.constexpr(64)
"""Columns that the copy engine moves at once: 128 bytes, its widest swizzle. A head has two pieces."""
CONSUMER_REGISTERS, PRODUCER_REGISTERS = gl.constexpr(232), gl.constexpr(40)
"""Per thread. The first warp group gets what is left of 3 x 168, which is 232 too; 384 threads have 168 at first."""


@dataclass(frozen=True)
class Tiles:
    """How the work is cut: each warp group makes m x n, and of a `shared` tile half the rows. `group` tiles of rows go
    together, to find columns of b in the cache. `lag`: by how many steps of k, at most `stages`, the second warp group
    of a shared tile stays behind."""

    m: int = 128
    n: int = 128
    k: int = 64
    stages: int = 5
    group: int = 16
    shared: bool = False
    lag: int = 0


PINGPONG = Tiles()
SHARED = Tiles(m=64, n=256, stages=3, shared=True, lag=2)
TILES = SHARED  # three quarters of the traffic from the cache; to be confirmed by measurement


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
    STAGES: gl.constexpr, GROUP: gl.constexpr, SHARED: gl.constexpr,
):  # fmt: skip
    """Order the operands of all tiles, a slot of the ring as soon as it is free."""
    a_ring, b_ring, ready, free = ring
    row_tiles, column_tiles = tiles
    step = 0
    for tile in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
        row, column = place(tile, row_tiles, column_tiles, GROUP)
        n = column * N
        for k in range(0, depth, K):
            slot = step % STAGES
            arrived = ready.index(slot)
            mbarrier.wait(free.index(slot), ((step // STAGES) & 1) ^ 1)  # the first round finds all slots free
            mbarrier.expect(arrived, (2 if SHARED else 1) * a_desc.block_type.nbytes + b_desc.block_type.nbytes)
            if SHARED:
                tma.async_copy_global_to_shared(a_desc, [row * 2 * M, k], arrived, a_ring.index(slot * 2))
                tma.async_copy_global_to_shared(a_desc, [row * 2 * M + M, k], arrived, a_ring.index(slot * 2 + 1))
            else:
                tma.async_copy_global_to_shared(a_desc, [row * M, k], arrived, a_ring.index(slot))
            at = [k, n] if B_BY_DEPTH else [n, k]
            tma.async_copy_global_to_shared(b_desc, at, arrived, b_ring.index(slot))
            step += 1


@gluon.jit
def multiply(
    number, ring, turn, steps, WHO: gl.constexpr, B_BY_DEPTH: gl.constexpr, M: gl.constexpr, N: gl.constexpr,
    STAGES: gl.constexpr, SHARED: gl.constexpr, LAG: gl.constexpr,
):  # fmt: skip
    """The products of the program's tile of that `number`. One step is always in flight; the slot before it is freed.

    Taking turns, WHO 0 may begin its n-th tile after the other's tile n - 1, and WHO 1 after the other's tile n; a
    shared tile WHO 1 may begin after LAG steps of the other."""
    a_ring, b_ring, ready, free = ring
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16])
    product = gl.zeros((M, N), gl.float32, layout)
    if not SHARED:
        mbarrier.wait(turn.index(WHO), (number // 2 + 1 + WHO) & 1)
    elif LAG > 0 and WHO == 1:
        mbarrier.wait(turn.index(1), number & 1)
    first = number * steps
    for step in range(first, first + steps):
        slot = step % STAGES
        mbarrier.wait(ready.index(slot), (step // STAGES) & 1)
        a = a_ring.index(slot * 2 + WHO if SHARED else slot)
        b = b_ring.index(slot) if B_BY_DEPTH else b_ring.index(slot).permute((1, 0))
        begun = warpgroup_mma(a, b, product, is_async=True)
        product = warpgroup_mma_wait(1, deps=[begun])
        mbarrier.arrive(free.index((step + STAGES - 1) % STAGES), pred=step > first)
        if SHARED and LAG > 0 and WHO == 0:
            mbarrier.arrive(turn.index(1), pred=step == first + LAG - 1)
    if not SHARED:
        mbarrier.arrive(turn.index(1 - WHO))
    product = warpgroup_mma_wait(0, deps=[product])
    mbarrier.arrive(free.index((first + steps - 1) % STAGES))
    return product


@gluon.jit
def consume(
    WHO: gl.constexpr, ring, turn, staging, fetched, tiles, depth, inner, outer, ENDING: gl.constexpr,
    SWITCHES: gl.constexpr, B_BY_DEPTH: gl.constexpr, M: gl.constexpr, N: gl.constexpr, K: gl.constexpr,
    STAGES: gl.constexpr, GROUP: gl.constexpr, SHARED: gl.constexpr, LAG: gl.constexpr,
):  # fmt: skip
    """One warp group, WHO 0 or 1: multiply and end its tiles. The ending reads from `inner` and writes to `outer`.

    Its part of `staging` takes what the ending reads, then what it writes: free for the next tile as soon as the copy
    engine has read the result."""
    row_tiles, column_tiles = tiles
    steps = gl.cdiv(depth, K)
    count = gl.cdiv(row_tiles * column_tiles - gl.program_id(0), gl.num_programs(0))
    arrived = fetched.index(WHO)
    fetches = 0
    for number in range(0 if SHARED else WHO, count, 1 if SHARED else 2):
        tile = gl.program_id(0) + number * gl.num_programs(0)
        row, column = place(tile, row_tiles, column_tiles, GROUP)
        m = (row * 2 + WHO) * M if SHARED else row * M
        n = column * N
        source = column_read(n, ENDING, SWITCHES)
        tma.store_wait(0)  # long done: the other warp group has multiplied since
        if source >= 0:
            fetch(inner, m, source, staging, arrived, WHO, N)
        product = multiply(number, ring, turn, steps, WHO, B_BY_DEPTH, M, N, STAGES, SHARED, LAG)
        if source >= 0:
            mbarrier.wait(arrived, fetches & 1)
            fetches += 1
        if ENDING == "heads":
            heads_ending(product, m, n, staging, outer, SWITCHES, WHO, M, N)
        else:
            elementwise_ending(product, m, n, staging, outer, ENDING, WHO, M, N)
    tma.store_wait(0)


@gluon.jit
def column_read(n, ENDING: gl.constexpr, SWITCHES: gl.constexpr):
    """The first column of what the ending of a tile at column n reads; negative if it reads nothing."""
    if ENDING == "relu2_backward":
        column = n
    elif ENDING == "heads" and SWITCHES[4]:  # only values have something mixed in
        column = n - (SWITCHES[0] + SWITCHES[1]) * 2 * PIECE
    else:
        column = -1
    return column


@gluon.jit
def fetch(desc, m, n, staging, arrived, WHO: gl.constexpr, N: gl.constexpr):
    """Order N columns of `desc` into the warp group's part of `staging`."""
    pieces: gl.constexpr = N // PIECE
    mbarrier.expect(arrived, pieces * desc.block_type.nbytes)
    for p in gl.static_range(pieces):
        tma.async_copy_global_to_shared(desc, [m, n + p * PIECE], arrived, staging.index(WHO * pieces + p))


@gluon.jit
def send(desc, m, n, staging, WHO: gl.constexpr, N: gl.constexpr):
    """Order the warp group's part of `staging`, which its threads have written, to be stored."""
    pieces: gl.constexpr = N // PIECE
    fence_async_shared()  # what threads wrote must be visible to the copy engine
    for p in gl.static_range(pieces):
        tma.async_copy_shared_to_global(desc, [m, n + p * PIECE], staging.index(WHO * pieces + p))


@gluon.jit
def halves(x, M: gl.constexpr, N: gl.constexpr):
    """The left and the right half of x (M, N). A thread has columns of both, so nothing moves."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N // 2, 16])
    left, right = gl.split(gl.permute(gl.reshape(x, (M, 2, N // 2)), (0, 2, 1)))
    left = gl.convert_layout(left, layout, assert_trivial=True)
    right = gl.convert_layout(right, layout, assert_trivial=True)
    return left, right


@gluon.jit
def cut(x, M: gl.constexpr, N: gl.constexpr):
    """x (M, N) in pieces of 64 columns, N being 128 or 256."""
    left, right = halves(x, M, N)
    if N == 2 * PIECE:
        pieces = (left, right)
    else:
        pieces = halves(left, M, N // 2) + halves(right, M, N // 2)
    return pieces


@gluon.jit
def elementwise_ending(
    product, m, n, staging, c_desc, ENDING: gl.constexpr, WHO: gl.constexpr, M: gl.constexpr, N: gl.constexpr
):
    """End a tile: nothing, relu(z)², or z·2·sqrt(kept)."""
    pieces = cut(product, M, N)
    for p in gl.static_range(N // PIECE):
        z = pieces[p]
        piece = staging.index(WHO * (N // PIECE) + p)
        if ENDING == "relu2":
            z = gl.maximum(z, 0.0)
            z = z * z
        if ENDING == "relu2_backward":
            z = z * (2.0 * gl.sqrt(piece.load(z.type.layout).to(gl.float32)))
        piece.store(z.to(staging.dtype))
    send(c_desc, m, n, staging, WHO, N)


@gluon.jit
def heads_ending(
    product, m, n, staging, outer, SWITCHES: gl.constexpr, WHO: gl.constexpr, M: gl.constexpr, N: gl.constexpr
):
    """End a tile of one or two heads: queries and keys are normalised and turned, values mixed."""
    q_desc, k_desc, v_desc, own_desc, tables, sizes = outer
    first_key = SWITCHES[0] * 2 * PIECE
    first_value = first_key + SWITCHES[1] * 2 * PIECE
    pieces = cut(product, M, N)
    if n < first_value:
        turn_heads(pieces, m, n // (2 * PIECE), staging, tables, sizes, SWITCHES, WHO, M, N)
        if n < first_key:
            send(q_desc, m, n, staging, WHO, N)
        else:
            send(k_desc, m, n - first_key, staging, WHO, N)
    else:
        mix_values(pieces, m, n - first_value, staging, v_desc, own_desc, tables[0], SWITCHES, WHO, N)


@gluon.jit
def turn_heads(
    pieces, m, head, staging, tables, sizes, SWITCHES: gl.constexpr, WHO: gl.constexpr, M: gl.constexpr,
    N: gl.constexpr,
):  # fmt: skip
    """Normalised and turned heads into `staging`, scales into memory. Each head is two pieces, a pair an element of
    either; all heads of the tile have the same positions."""
    _, cos_ptr, sin_ptr, scale_ptr = tables
    rows, sequence, eps = sizes
    NORMED: gl.constexpr = SWITCHES[0] + SWITCHES[1]
    PAIRS: gl.constexpr = SWITCHES[2]
    layout: gl.constexpr = pieces[0].type.layout
    row = m + gl.arange(0, M, gl.SliceLayout(1, layout))
    column = gl.arange(0, PIECE, gl.SliceLayout(0, layout))[None, :]
    inside = row < rows
    turns = inside[:, None] & (column < PAIRS)
    angle = (row % sequence)[:, None] * PAIRS + column
    cos = gl.load(cos_ptr + angle, mask=turns, other=1.0).to(gl.float32)
    sin = gl.load(sin_ptr + angle, mask=turns, other=0.0).to(gl.float32)
    for h in gl.static_range(N // (2 * PIECE)):
        a = pieces[2 * h]
        b = pieces[2 * h + 1]
        scale = gl.rsqrt(gl.sum(a * a + b * b, 1) * (1.0 / (2 * PIECE)) + eps)
        gl.store(scale_ptr + row.to(gl.int64) * NORMED + (head + h), scale, mask=inside)
        staging.index(WHO * (N // PIECE) + 2 * h).store(((a * cos + b * sin) * scale[:, None]).to(staging.dtype))
        staging.index(WHO * (N // PIECE) + 2 * h + 1).store(((b * cos - a * sin) * scale[:, None]).to(staging.dtype))


@gluon.jit
def mix_values(
    pieces, m, n, staging, v_desc, own_desc, mix_ptr, SWITCHES: gl.constexpr, WHO: gl.constexpr, N: gl.constexpr
):
    """Raw values, if they are mixed, then mixed ones, through `staging` into memory; what was fetched into it first."""
    MIXED: gl.constexpr = SWITCHES[3]
    EXTRA: gl.constexpr = SWITCHES[4]
    own = gl.load(mix_ptr).to(gl.float32) if MIXED else 1.0
    share = gl.load(mix_ptr + 1).to(gl.float32) if EXTRA else 0.0
    mixed = ()
    for p in gl.static_range(N // PIECE):
        piece = staging.index(WHO * (N // PIECE) + p)
        value = pieces[p] * own
        if EXTRA:
            value = value + share * piece.load(value.type.layout).to(gl.float32)
        if MIXED:
            piece.store(pieces[p].to(staging.dtype))
        mixed = mixed + (value,)  # type: ignore[assignment]
    if MIXED:
        send(own_desc, m, n, staging, WHO, N)
        tma.store_wait(0)  # the same room takes the mixed values
    for p in gl.static_range(N // PIECE):
        staging.index(WHO * (N // PIECE) + p).store(mixed[p].to(staging.dtype))
    send(v_desc, m, n, staging, WHO, N)


@gluon.jit
def run_product(
    a_desc, b_desc, piece_desc, tiles, depth, inner, outer, ENDING: gl.constexpr, SWITCHES: gl.constexpr,
    B_BY_DEPTH: gl.constexpr, M: gl.constexpr, N: gl.constexpr, K: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr, SHARED: gl.constexpr, LAG: gl.constexpr,
):  # fmt: skip
    """Set up shared memory and send the warps to work.

    ready: the slot's operands have arrived. free: all its readers have finished. turn: a warp group may multiply.
    fetched: what the ending reads has arrived. One thread arrives for its whole warp group, after its barrier."""
    slots_of_a: gl.constexpr = STAGES * (2 if SHARED else 1)
    a_ring = gl.allocate_shared_memory(a_desc.dtype, [slots_of_a] + a_desc.block_shape, a_desc.layout)
    b_ring = gl.allocate_shared_memory(b_desc.dtype, [STAGES] + b_desc.block_shape, b_desc.layout)
    pieces: gl.constexpr = 2 * (N // PIECE)
    staging = gl.allocate_shared_memory(piece_desc.dtype, [pieces] + piece_desc.block_shape, piece_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    fetched = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(ready.index(s), count=1)
        mbarrier.init(free.index(s), count=2 if SHARED else 1)
    for w in gl.static_range(2):
        mbarrier.init(turn.index(w), count=1)
        mbarrier.init(fetched.index(w), count=1)
    fence_async_shared()  # the copy engine must see the barriers too
    ring = (a_ring, b_ring, ready, free)
    gl.warp_specialize(
        [
            (consume, (0, ring, turn, staging, fetched, tiles, depth, inner, outer, ENDING, SWITCHES, B_BY_DEPTH, M, N,
                       K, STAGES, GROUP, SHARED, LAG)),
            (consume, (1, ring, turn, staging, fetched, tiles, depth, inner, outer, ENDING, SWITCHES, B_BY_DEPTH, M, N,
                       K, STAGES, GROUP, SHARED, LAG)),
            (produce, (a_desc, b_desc, ring, tiles, depth, B_BY_DEPTH, M, N, K, STAGES, GROUP, SHARED)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


def _name(specialization):
    """What a profile calls it, by who uses it, as in `product_fused`."""
    return "mlp_product" if "relu2" in specialization.constants["ENDING"] else "product_pingpong"


@gluon.jit(repr=_name)
def product_pingpong(
    a_desc,
    b_desc,
    c_desc,
    kept_desc,
    rows,
    columns,
    depth,
    ENDING: gl.constexpr,
    B_BY_DEPTH: gl.constexpr,
    M: gl.constexpr,
    N: gl.constexpr,
    K: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    SHARED: gl.constexpr,
    LAG: gl.constexpr,
):
    """c (rows, columns) = ending(a bᵀ). a (rows, depth); b (columns, depth), B_BY_DEPTH (depth, columns); kept as c."""
    tiles = (gl.cdiv(rows, 2 * M if SHARED else M), gl.cdiv(columns, N))
    run_product(
        a_desc, b_desc, c_desc, tiles, depth, kept_desc, c_desc, ENDING, (), B_BY_DEPTH, M, N, K, STAGES, GROUP, SHARED,
        LAG,
    )  # fmt: skip


@gluon.jit
def heads_pingpong(
    x_desc,
    weight_desc,
    q_desc,
    k_desc,
    v_desc,
    own_desc,
    extra_desc,
    mix_ptr,
    cos_ptr,
    sin_ptr,
    scale_ptr,
    rows,
    depth,
    sequence,
    eps,
    HEADS: gl.constexpr,
    KV_HEADS: gl.constexpr,
    PAIRS: gl.constexpr,
    MIXED: gl.constexpr,
    EXTRA: gl.constexpr,
    M: gl.constexpr,
    N: gl.constexpr,
    K: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    SHARED: gl.constexpr,
    LAG: gl.constexpr,
):
    """What `heads_fused.heads_product` makes: all heads of all rows, 128 wide."""
    tiles = (gl.cdiv(rows, 2 * M if SHARED else M), (HEADS + 2 * KV_HEADS) * 2 * PIECE // N)
    outer = (q_desc, k_desc, v_desc, own_desc, (mix_ptr, cos_ptr, sin_ptr, scale_ptr), (rows, sequence, eps))
    SWITCHES: gl.constexpr = (HEADS, KV_HEADS, PAIRS, MIXED, EXTRA)
    run_product(
        x_desc, weight_desc, q_desc, tiles, depth, extra_desc, outer, "heads", SWITCHES, False, M, N, K, STAGES, GROUP,
        SHARED, LAG,
    )  # fmt: skip


def operand(tensor: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A matrix that the copy engine moves in blocks of rows x columns."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 * tensor.element_size(), rank=2)
    return TensorDescriptor.from_tensor(tensor.view(tensor.size(0), -1), [rows, columns], layout)


def constants(tiles: Tiles, depth: int) -> dict[str, Any]:
    """What all kernels take. With fewer steps of depth than stages the ring would let the first of two warp groups that
    share tiles give the second two turns at once, which a barrier cannot count: no lag then."""
    return {
        "M": tiles.m,
        "N": tiles.n,
        "K": tiles.k,
        "STAGES": tiles.stages,
        "GROUP": tiles.group,
        "SHARED": tiles.shared,
        "LAG": tiles.lag if depth >= tiles.k * tiles.stages else 0,
        "num_warps": 4,
    }


def programs(device: torch.device) -> tuple[int]:
    """One per multiprocessor."""
    return (torch.cuda.get_device_properties(device).multi_processor_count,)


def product(
    a: Tensor,
    b: Tensor,
    ending: Ending = "none",
    kept: Tensor | None = None,
    *,
    out: Tensor | None = None,
    tiles: Tiles = TILES,
) -> Tensor:
    """As `product_fused.product`: ending(a bᵀ), a (rows, depth) contiguous and b (columns, depth) contiguous or the
    transpose of such; so is out. All in bf16 or fp16."""
    rows, depth, columns = a.size(0), a.size(1), b.size(0)
    by_depth = not b.is_contiguous()
    c = a.new_empty(rows, columns) if out is None else out
    product_pingpong[programs(a.device)](
        operand(a, tiles.m, tiles.k),
        operand(b.T, tiles.k, tiles.n) if by_depth else operand(b, tiles.n, tiles.k),
        operand(c, tiles.m, PIECE.value),
        operand(c if kept is None else kept, tiles.m, PIECE.value),
        rows,
        columns,
        depth,
        ENDING=ending,
        B_BY_DEPTH=by_depth,
        **constants(tiles, depth),
    )
    return c


def launch_product(
    made: Made, x: Tensor, weight: Tensor, extra: Tensor | None, mix: Tensor | None, cos: Tensor, sin: Tensor,
    eps: float, shape: Shape, *, tiles: Tiles = TILES,
) -> None:  # fmt: skip
    """As `heads_fused.launch_product`: fill `made`, of a shape with whole tiles, by the product whose ending makes the
    heads."""

    def by_row(tensor: Tensor) -> TensorDescriptor:
        return operand(tensor, tiles.m, PIECE.value)

    heads_pingpong[programs(x.device)](
        operand(x, tiles.m, tiles.k),
        operand(weight, tiles.n, tiles.k),
        by_row(made.q),
        by_row(made.k),
        by_row(made.v),
        by_row(made.v if mix is None else made.own),
        by_row(made.v if extra is None else extra),
        made.norm if mix is None else mix,
        cos,
        sin,
        made.norm,
        x.size(0),
        x.size(1),
        cos.size(0),
        eps,
        HEADS=shape.heads,
        KV_HEADS=shape.kv_heads,
        PAIRS=cos.size(1),
        MIXED=mix is not None,
        EXTRA=extra is not None,
        **constants(tiles, x.size(1)),
    )
