"""The warp-specialised product against float64 on a GPU. The CPU twin, of its compilation, is next door."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton.experimental.gluon")

from kernels.fused_cases import relative_error, seeded
from paceline.kernels.product_pingpong import slope_product

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LAUNCHES = 20
"""A race shows in some launches only."""


def on_gpu(*shape: int, seed: int) -> Tensor:
    return seeded(*shape, seed=seed).to("cuda", torch.bfloat16)


@pytest.mark.parametrize(
    ("rows", "depth", "columns"),
    [
        (40_000, 768, 3_072),  # many tiles for each program
        (128 * 133, 256, 256),  # one program has one tile more
        (1_000, 768, 520),  # neither rows nor columns fill their tiles
        (1, 64, 8),  # one tile, one step: fewer than the ring has slots
        (5_000, 136, 1_032),  # depth does not fill its step
    ],
)
def test_it_equals_float64_at_every_launch(rows: int, depth: int, columns: int) -> None:
    a, b, kept = on_gpu(rows, depth, seed=1), on_gpu(depth, columns, seed=2), on_gpu(rows, columns, seed=3).square()
    expected = a.double() @ b.double() * 2 * kept.double().sqrt()
    first = slope_product(a, b, kept)
    assert relative_error(first, expected) < 3e-3  # one rounding to bf16: 2^-9 at most
    for _ in range(LAUNCHES):
        assert torch.equal(slope_product(a, b, kept), first)
