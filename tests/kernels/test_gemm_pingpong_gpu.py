"""The warp-specialised products against float64 on a GPU. The CPU twin, of their compilation, is next door."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton.experimental.gluon")

from kernels.fused_cases import relative_error, seeded
from paceline.kernels.gemm_pingpong import slope_product, slopes_and_sums

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


@pytest.mark.parametrize(
    ("rows", "depth", "columns"),
    [
        (16_384, 768, 50_304),  # many tiles for each program
        (1_000, 768, 50_264),  # neither rows nor columns fill their tiles
        (128 * 133, 256, 128),  # one program has one tile more
        (1, 64, 8),  # one tile, one step: fewer than the ring has slots
        (5_000, 136, 1_032),  # depth does not fill its step
    ],
)
def test_slopes_and_sums_equal_float64_at_every_launch(rows: int, depth: int, columns: int) -> None:
    cap = 15.0
    x, weight = on_gpu(rows, depth, seed=1), on_gpu(columns, depth, seed=2) * depth**-0.5
    slopes, again = x.new_empty(2, rows, columns)
    sums = slopes_and_sums(x, weight, cap, out=slopes)
    few = slice(None, 2_000)  # float64 takes four times the room
    bent = torch.tanh(x[few].double() @ weight.double().T / cap)
    exponentials = (cap * bent).exp()
    assert relative_error(slopes[few], exponentials * (1 - bent.square())) < 5e-3  # bf16, and tanh by the hardware
    tiles = exponentials.split(128, dim=1)
    assert relative_error(sums[:, few], torch.stack([tile.sum(1) for tile in tiles])) < 2e-3
    for _ in range(LAUNCHES):
        assert torch.equal(slopes_and_sums(x, weight, cap, out=again.zero_()), sums)
        assert torch.equal(again, slopes)
