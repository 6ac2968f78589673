"""A matrix product that ends in ReLU², for a Hopper GPU with Triton. Plain twin: product, then activation.

Persistent programs, one per multiprocessor, tiles of 128 x 256, operands by the bulk copy engine, the result stored in
halves so that shared memory has room for another stage. At the depth of 768 that our products have it takes little
more than the library's product alone (0.44 ms against 0.43 for 65,536 x 3,072 on an H200), so the ending is nearly
free.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


@dataclass(frozen=True)
class Tiles:
    """How the work is cut; `group` tiles of rows go together, so that they share columns of b in the cache."""

    m: int = 128
    n: int = 256
    k: int = 64
    group: int = 16
    stages: int = 4
    warps: int = 8


TILES = Tiles(group=32)


@triton.jit
def mlp_product(
    a_desc, b_desc, c_desc, rows, columns, depth, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """c (rows, columns) = relu(a bᵀ)². a (rows, depth), b (columns, depth)."""
    row_tiles = tl.cdiv(rows, BLOCK_M)
    group_tiles = GROUP_M * tl.cdiv(columns, BLOCK_N)
    for tile in tl.range(tl.program_id(0), row_tiles * tl.cdiv(columns, BLOCK_N), PROGRAMS, flatten=True):
        first = (tile // group_tiles) * GROUP_M
        height = min(row_tiles - first, GROUP_M)
        m = (first + (tile % group_tiles) % height) * BLOCK_M
        n = ((tile % group_tiles) // height) * BLOCK_N
        product = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, depth, BLOCK_K):
            product = tl.dot(a_desc.load([m, k]), b_desc.load([n, k]).T, product)
        left, right = tl.split(tl.reshape(product, (BLOCK_M, 2, BLOCK_N // 2)).permute(0, 2, 1))
        left = tl.maximum(left, 0.0)
        left *= left
        right = tl.maximum(right, 0.0)
        right *= right
        c_desc.store([m, n], left.to(c_desc.dtype))
        c_desc.store([m, n + BLOCK_N // 2], right.to(c_desc.dtype))


def relu2_product(a: Tensor, b: Tensor) -> Tensor:
    """relu(a bᵀ)², a (rows, depth) and b (columns, depth) contiguous."""
    (rows, depth), columns, t = a.shape, b.size(0), TILES
    c = a.new_empty(rows, columns)
    programs = torch.cuda.get_device_properties(a.device).multi_processor_count if a.is_cuda else 4
    blocks = ((a, [t.m, t.k]), (b, [t.n, t.k]), (c, [t.m, t.n // 2]))
    descs = (TensorDescriptor.from_tensor(matrix, block) for matrix, block in blocks)
    sizes = {"BLOCK_M": t.m, "BLOCK_N": t.n, "BLOCK_K": t.k, "GROUP_M": t.group, "PROGRAMS": programs}
    mlp_product[(programs,)](*descs, rows, columns, depth, **sizes, num_warps=t.warps, num_stages=t.stages)
    return c
