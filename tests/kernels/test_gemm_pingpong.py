"""The warp-specialised products compile for the GPU they are for. What they compute is tested on one, next door."""

from typing import Any

import pytest

pytest.importorskip("triton.experimental.gluon")

from triton.backends.compiler import GPUTarget
from triton.compiler import compile
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from paceline.kernels.gemm_pingpong import TILES, constants, head_loss_slopes, mlp_slope_product

SHARED_BYTES, RESERVED_BYTES = 233_472, 1_024
"""Of one multiprocessor of an H100 or H200, and what each program on it costs beside its own."""
LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


def for_hopper(kernel: Any, blocks: dict[str, tuple[int, int]], types: dict[str, str], **given: Any) -> Any:
    """The compiled kernel, of whose operands the copy engine moves `blocks`."""
    types = types | {
        name: f"tensordesc<bf16[{rows}, {columns}],{LAYOUT!r}>" for name, (rows, columns) in blocks.items()
    }
    types |= dict.fromkeys(("rows", "columns", "depth"), "i32")
    given |= constants(TILES)
    options = {"num_warps": given.pop("num_warps")}
    source = GluonASTSource(
        fn=kernel,
        signature={name: types.get(name, "constexpr") for name in kernel.arg_names},
        constexprs={(kernel.arg_names.index(name),): value for name, value in given.items()},
    )
    return compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def uses_two_warp_groups(done: Any) -> bool:
    """Both warp groups of consumers multiply and take registers from the producer's; all fits the shared memory."""
    waits = done.asm["ptx"].count("wgmma.wait_group")  # one step in flight, then none, in either
    registers = all(f"setmaxnreg.{way}.sync.aligned.u32 \t232" in done.asm["ptx"] for way in ("inc", "dec"))
    fits = done.metadata.shared + RESERVED_BYTES <= SHARED_BYTES
    return waits == 4 and registers and done.metadata.num_warps == 12 and fits


def test_the_slope_product_compiles() -> None:
    tile = {"c_desc": (TILES.m, 64), "kept_desc": (TILES.m, 64)}
    blocks = {"a_desc": (TILES.m, TILES.k), "b_desc": (TILES.k, TILES.n), **tile}
    assert uses_two_warp_groups(for_hopper(mlp_slope_product, blocks, {}))


@pytest.mark.parametrize("masked", [False, True])
def test_the_product_of_logits_compiles(masked: bool) -> None:
    """In either warp group a thread has 128 logits, and takes one tanh and one exponential of each."""
    blocks = {"x_desc": (TILES.m, TILES.k), "weight_desc": (TILES.n, TILES.k), "slopes_desc": (TILES.m, 64)}
    types = {"sums_ptr": "*fp32", "bend_ptr": "*fp32", "gain": "fp32"}
    done = for_hopper(head_loss_slopes, blocks, types, MASKED=masked)
    assert uses_two_warp_groups(done)
    code = done.asm["ptx"]
    assert code.count("tanh.approx.f32") == code.count("ex2.approx.ftz.f32") == 2 * 128
