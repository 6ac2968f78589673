"""The warp-specialised products against float64 on a GPU. The CPU twins, of their compilation, are next door."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton.experimental.gluon")

from kernels.fused_cases import EPS, relative_error, seeded
from paceline.kernels.heads_fused import Made, Shape
from paceline.kernels.product_pingpong import PINGPONG, SHARED, Ending, Tiles, launch_product, product

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.parametrize("tiles", [PINGPONG, SHARED], ids=["pingpong", "shared"]),
]
ENDINGS: dict[Ending, Callable[[Tensor, Tensor], Tensor]] = {
    "none": lambda z, kept: z,
    "relu2": lambda z, kept: F.relu(z).square(),
    "relu2_backward": lambda z, kept: z * 2 * kept.sqrt(),
}
LAUNCHES = 20
"""A race shows in some launches only."""


def on_gpu(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return seeded(*shape, seed=seed, scale=scale).to("cuda", torch.bfloat16)


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("by_depth", [True, False])
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
def test_products_equal_float64_at_every_launch(
    tiles: Tiles, ending: Ending, by_depth: bool, rows: int, depth: int, columns: int
) -> None:
    a = on_gpu(rows, depth, seed=1)
    b = on_gpu(depth, columns, seed=2).T if by_depth else on_gpu(columns, depth, seed=2)
    kept = on_gpu(rows, columns, seed=3).square()
    expected = ENDINGS[ending](a.double() @ b.double().T, kept.double())
    first = product(a, b, ending, kept, tiles=tiles)
    assert relative_error(first, expected) < 3e-3  # one rounding to bf16: 2^-9 at most
    for _ in range(LAUNCHES):
        assert torch.equal(product(a, b, ending, kept, tiles=tiles), first)


@pytest.mark.parametrize("extra", [True, False])
@pytest.mark.parametrize("mixed", [True, False])
@pytest.mark.parametrize(("sequence", "sequences"), [(4_096, 8), (70, 3)])
def test_heads_equal_float64_at_every_launch(
    tiles: Tiles, mixed: bool, extra: bool, sequence: int, sequences: int
) -> None:
    if extra and not mixed:
        pytest.skip("nothing is mixed without scalars")
    shape, rows, depth, pairs = Shape(6, 4, 128), sequence * sequences, 768, 32
    x, weight = on_gpu(rows, depth, seed=1), on_gpu(14 * 128, depth, seed=2, scale=depth**-0.5)
    table = on_gpu(rows, 4, 128, seed=3) if extra else None
    mix = torch.tensor([0.4, 0.7], device="cuda") if mixed else None
    angle = seeded(sequence, pairs, seed=4, scale=3.0).cuda()
    cos, sin = angle.cos(), angle.sin()

    def made() -> list[Tensor]:
        kv = (rows, 4, 128)
        parts = [x.new_empty(rows, 6, 128), x.new_empty(kv), x.new_empty(kv), x.new_empty(kv if mixed else 0)]
        into = Made(*parts, x.new_empty(rows, 10, dtype=torch.float32))
        launch_product(into, x, weight, table, mix, cos, sin, EPS, shape, tiles=tiles)
        return [into.q, into.k, into.v, into.own, into.norm]

    first = made()
    q, k, own = (x.double() @ weight.double().T).unflatten(-1, (14, 128)).split([6, 4, 4], dim=1)
    scales = [(part.square().mean(-1) + EPS).rsqrt() for part in (q, k)]
    turned = [turn(part * scale[..., None], cos, sin) for part, scale in zip((q, k), scales, strict=True)]
    v = own if mix is None else mix[0].double() * own
    v = v if mix is None or table is None else v + mix[1].double() * table.double()
    expected = [*turned, v, own if mixed else own[:0], torch.cat(scales, 1)]
    for found, judge in zip(first, expected, strict=True):
        if found.numel():
            assert relative_error(found, judge) < 3e-3  # one rounding to bf16
    for _ in range(LAUNCHES):
        assert all(torch.equal(again, once) for again, once in zip(made(), first, strict=True))


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (rows, heads, width), whose first pairs turn by the angle of the row's position."""
    pairs, half = cos.size(1), x.size(-1) // 2
    c, s = (table.double().repeat(x.size(0) // cos.size(0), 1)[:, None] for table in (cos, sin))
    a, a_rest, b, b_rest = x.split([pairs, half - pairs, pairs, half - pairs], dim=-1)
    return torch.cat([a * c + b * s, a_rest, b * c - a * s, b_rest], dim=-1)
