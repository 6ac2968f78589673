"""A matrix product with an elementwise ending, for a Hopper GPU with Triton. Plain twin: product, then ending.

Persistent programs, one per multiprocessor, tiles of 128 x 256, operands by the bulk copy engine, the result stored in
halves so that shared memory has room for another stage. At the depth of 768 that our products have it takes little
more than the library's product alone (0.44 ms against 0.43 for 65,536 x 3,072 on an H200), so the ending is nearly
free.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

Ending = Literal["relu2", "relu2_backward"]


@dataclass(frozen=True)
class Tiles:
    """How the work is cut; `group` tiles of rows go together, so that they share columns of b in the cache."""

    m: int = 128
    n: int = 256
    k: int = 64
    group: int = 16
    stages: int = 4
    warps: int = 8


TILES = {
    "relu2": Tiles(group=32),
    "relu2_backward": Tiles(stages=3, group=8),  # the kept values need a stage's room
}


@triton.jit
def mlp_product(
    a_desc, b_desc, c_desc, kept_desc, rows, columns, depth, ENDING: tl.constexpr, B_BY_DEPTH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """c (rows, columns) = ending(a bᵀ). a (rows, depth); b (columns, depth), B_BY_DEPTH (depth, columns); kept as c."""
    row_tiles = tl.cdiv(rows, BLOCK_M)
    group_tiles = GROUP_M * tl.cdiv(columns, BLOCK_N)
    for tile in tl.range(tl.program_id(0), row_tiles * tl.cdiv(columns, BLOCK_N), PROGRAMS, flatten=True):
        first = (tile // group_tiles) * GROUP_M
        height = min(row_tiles - first, GROUP_M)
        m = (first + (tile % group_tiles) % height) * BLOCK_M
        n = ((tile % group_tiles) // height) * BLOCK_N
        product = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, depth, BLOCK_K):
            b = b_desc.load([k, n]) if B_BY_DEPTH else b_desc.load([n, k]).T
            product = tl.dot(a_desc.load([m, k]), b, product)
        left, right = tl.split(tl.reshape(product, (BLOCK_M, 2, BLOCK_N // 2)).permute(0, 2, 1))
        middle = n + BLOCK_N // 2
        if ENDING == "relu2":
            left = tl.maximum(left, 0.0)
            left *= left
            right = tl.maximum(right, 0.0)
            right *= right
        if ENDING == "relu2_backward":
            left *= 2.0 * tl.sqrt(kept_desc.load([m, n]).to(tl.float32))
        c_desc.store([m, n], left.to(c_desc.dtype))
        if ENDING == "relu2_backward":
            right *= 2.0 * tl.sqrt(kept_desc.load([m, middle]).to(tl.float32))
        c_desc.store([m, middle], right.to(c_desc.dtype))


def product(a: Tensor, b: Tensor, ending: Ending, kept: Tensor | None = None) -> Tensor:
    """ending(a bᵀ), a (rows, depth) contiguous and b (columns, depth) contiguous or the transpose of such.

    `relu2`: relu(z)². `relu2_backward`: z·2·sqrt(kept), `kept` being activated values: the gradient z carried through
    the activation."""
    rows, depth, columns = a.size(0), a.size(1), b.size(0)
    by_depth = not b.is_contiguous()
    c = a.new_empty(rows, columns)
    t = TILES[ending]
    programs = torch.cuda.get_device_properties(a.device).multi_processor_count if a.is_cuda else 4
    b_block = (b.T, [t.k, t.n]) if by_depth else (b, [t.n, t.k])
    half = [t.m, t.n // 2]
    blocks = ((a, [t.m, t.k]), b_block, (c, half), (c if kept is None else kept, half))
    descs = (TensorDescriptor.from_tensor(matrix, block) for matrix, block in blocks)
    sizes = {"BLOCK_M": t.m, "BLOCK_N": t.n, "BLOCK_K": t.k, "GROUP_M": t.group, "PROGRAMS": programs}
    options = {"ENDING": ending, "B_BY_DEPTH": by_depth, "num_warps": t.warps, "num_stages": t.stages}
    mlp_product[(programs,)](*descs, rows, columns, depth, **sizes, **options)
    return c
