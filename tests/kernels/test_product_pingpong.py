"""The warp-specialised product compiles for the GPU it is for. What it computes is tested on one, next door."""

import pytest

pytest.importorskip("triton.experimental.gluon")

from triton.backends.compiler import GPUTarget
from triton.compiler import compile
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from paceline.kernels.product_pingpong import TILES, constants, mlp_slope_product

SHARED_BYTES, RESERVED_BYTES = 233_472, 1_024
"""Of one multiprocessor of an H100 or H200, and what each program on it costs beside its own."""
LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


def test_it_compiles_for_two_warp_groups_and_fits_the_shared_memory() -> None:
    """Both warp groups of consumers multiply and take registers from the producer's."""
    blocks = {
        "a_desc": (TILES.m, TILES.k),
        "b_desc": (TILES.k, TILES.n),
        "c_desc": (TILES.m, 64),
        "kept_desc": (TILES.m, 64),
    }
    types = {name: f"tensordesc<bf16[{rows}, {columns}],{LAYOUT!r}>" for name, (rows, columns) in blocks.items()}
    types |= dict.fromkeys(("rows", "columns", "depth"), "i32")
    given, names = constants(TILES), mlp_slope_product.arg_names
    options = {"num_warps": given.pop("num_warps")}
    source = GluonASTSource(
        fn=mlp_slope_product,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in given.items()},
    )
    done = compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert done.asm["ptx"].count("wgmma.wait_group") == 4  # one step in flight, then none, in either
    assert all(f"setmaxnreg.{way}.sync.aligned.u32 \t232" in done.asm["ptx"] for way in ("inc", "dec"))
    assert done.metadata.num_warps == 12
    assert done.metadata.shared + RESERVED_BYTES <= SHARED_BYTES
