"""Products that are symmetric, each pair of tiles computed once, for Muon on a Hopper GPU with Triton.

Plain twin: `optim.newton_schulz._polynomial_first`, whose first two products are symmetric: A = XXᵀ, and bA + cA²,
which is bA + cAAᵀ. Only the tiles on and below the diagonal are computed; the others are their transposes: 21 of 36 for
the records' matrices, which spares a quarter of what Newton–Schulz multiplies.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

TILE, DEPTH = 128, 64
"""Sides of a tile, and how much of the depth is loaded at a time."""
STAGES, WARPS = 4, 4


def fits(rows: int, columns: int) -> bool:
    """Whether matrices of this shape (no taller than wide) are cut into whole tiles."""
    return rows % TILE == 0 and columns % DEPTH == 0


def gram(X: Tensor) -> Tensor:
    """X Xᵀ of each matrix, (n, r, c) contiguous to (n, r, r)."""
    return _symmetric(X, X, alpha=1.0, beta=0.0)


def gram_polynomial(A: Tensor, b: float, c: float) -> Tensor:
    """bA + cA² of each symmetric matrix A, (n, r, r)."""
    return _symmetric(A, A, alpha=c, beta=b)


@triton.jit
def muon_symmetric(
    x_desc, base_desc, out_desc, rows, depth, alpha, beta, ADDS: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr
):
    """One tile of alpha·x xᵀ + beta·base, and its mirror image, of one matrix of a stack that lies row under row."""
    place = tl.program_id(0)
    i = ((tl.sqrt(8.0 * place + 1.0) - 1.0) * 0.5).to(tl.int32)  # row of the triangle in which tile number `place` is
    i = tl.where(i * (i + 1) // 2 > place, i - 1, i)  # the root may round to either side
    i = tl.where((i + 1) * (i + 2) // 2 <= place, i + 1, i)
    j = place - i * (i + 1) // 2
    top = tl.program_id(1) * rows
    tile = tl.zeros((TILE, TILE), tl.float32)
    for k in range(0, depth, DEPTH):
        tile = tl.dot(x_desc.load([top + i * TILE, k]), x_desc.load([top + j * TILE, k]).T, tile)
    tile *= alpha
    if ADDS:
        tile += beta * base_desc.load([top + i * TILE, j * TILE]).to(tl.float32)
    rounded = tile.to(out_desc.dtype)
    out_desc.store([top + i * TILE, j * TILE], rounded)
    if i != j:
        out_desc.store([top + j * TILE, i * TILE], rounded.T)


def _symmetric(x: Tensor, base: Tensor, *, alpha: float, beta: float) -> Tensor:
    n, rows, depth = x.shape
    out = x.new_empty(n, rows, rows)
    stacks = ((x.view(n * rows, depth), DEPTH), (base.view(n * rows, -1), TILE), (out.view(n * rows, rows), TILE))
    descs = (TensorDescriptor.from_tensor(stack, [TILE, columns]) for stack, columns in stacks)
    tiles, sizes = rows // TILE, {"TILE": TILE, "DEPTH": DEPTH, "num_warps": WARPS, "num_stages": STAGES}
    grid = (tiles * (tiles + 1) // 2, n)
    muon_symmetric[grid](*descs, rows, depth, alpha, beta, ADDS=beta != 0.0, **sizes)
    return out
