"""The warp-specialised products compile for the GPU they are for. What they compute is tested on one, next door."""

from typing import Any

import pytest

pytest.importorskip("triton.experimental.gluon")

from triton.backends.compiler import GPUTarget
from triton.compiler import compile
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from paceline.kernels.product_pingpong import PINGPONG, SHARED, Tiles, constants, heads_pingpong, product_pingpong

SHARED_BYTES, RESERVED_BYTES = 233_472, 1_024
"""Of one multiprocessor of an H100 or H200, and what each program on it costs beside its own."""
LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


def block(rows: int, columns: int) -> str:
    return f"tensordesc<bf16[{rows}, {columns}],{LAYOUT!r}>"


def for_hopper(kernel: Any, types: dict[str, str], switches: dict[str, Any], tiles: Tiles, depth: int = 768) -> Any:
    given = constants(tiles, depth)
    options = {"num_warps": given.pop("num_warps")}
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    values = {(kernel.arg_names.index(name),): value for name, value in (given | switches).items()}
    source = GluonASTSource(fn=kernel, signature=signature, constexprs=values)
    return compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def check(done: Any) -> None:
    """Both warp groups of consumers multiply and take registers from the producer's; shared memory is enough."""
    assert done.asm["ptx"].count("wgmma.wait_group") == 4  # one step in flight, then none, in either
    assert all(f"setmaxnreg.{way}.sync.aligned.u32 \t232" in done.asm["ptx"] for way in ("inc", "dec"))
    assert done.metadata.num_warps == 12
    assert done.metadata.shared + RESERVED_BYTES <= SHARED_BYTES


@pytest.mark.parametrize("tiles", [PINGPONG, SHARED], ids=["pingpong", "shared"])
@pytest.mark.parametrize("by_depth", [True, False])
def test_products_compile_for_two_warp_groups_and_fit_the_shared_memory(tiles: Tiles, by_depth: bool) -> None:
    types = {
        "a_desc": block(tiles.m, tiles.k),
        "b_desc": block(tiles.k, tiles.n) if by_depth else block(tiles.n, tiles.k),
        "c_desc": block(tiles.m, 64),
        "kept_desc": block(tiles.m, 64),
        "rows": "i32",
        "columns": "i32",
        "depth": "i32",
    }
    check(for_hopper(product_pingpong, types, {"ENDING": "relu2_backward", "B_BY_DEPTH": by_depth}, tiles))


@pytest.mark.parametrize("tiles", [PINGPONG, SHARED], ids=["pingpong", "shared"])
@pytest.mark.parametrize("mixed", [True, False])
def test_heads_compile_for_two_warp_groups_and_fit_the_shared_memory(tiles: Tiles, mixed: bool) -> None:
    types = {name: block(tiles.m, 64) for name in heads_pingpong.arg_names if name.endswith("_desc")}
    types |= {"x_desc": block(tiles.m, tiles.k), "weight_desc": block(tiles.n, tiles.k)}
    types |= {name: "*fp32" for name in heads_pingpong.arg_names if name.endswith("_ptr")}
    types |= {"rows": "i32", "depth": "i32", "sequence": "i32", "eps": "fp32"}
    switches = {"HEADS": 6, "KV_HEADS": 6, "PAIRS": 32, "MIXED": mixed, "EXTRA": mixed}
    check(for_hopper(heads_pingpong, types, switches, tiles))


def test_a_product_of_less_depth_than_the_ring_has_no_lag() -> None:
    assert SHARED.lag > 0
    assert constants(SHARED, SHARED.k * SHARED.stages)["LAG"] == SHARED.lag
    assert constants(SHARED, SHARED.k * SHARED.stages - 1)["LAG"] == 0
