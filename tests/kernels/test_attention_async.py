"""The asynchronous attention kernels compile for the GPU they are for, and two programs fit a multiprocessor. What they
compute is tested on one, next door."""

from typing import Any

import pytest

pytest.importorskip("triton.experimental.gluon")

from triton.backends.compiler import GPUTarget
from triton.compiler import compile
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from paceline.kernels import attention_async
from paceline.kernels.attention_async import BACKWARD_KEYS, BACKWARD_QUERIES, FORWARD

SHARED_BYTES, RESERVED_BYTES = 233_472, 1_024
"""Of one multiprocessor of an H100 or H200, and what each program on it costs beside its own."""
LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
TILES = {"forward": FORWARD, "query_gradient": BACKWARD_QUERIES, "key_gradient": BACKWARD_KEYS}
PENDING = {"forward": (1, 3), "query_gradient": (1, 2), "key_gradient": (2, 1)}
"""Waits that leave one product in flight, and those that leave none."""


def for_hopper(name: str, width: int, *, raw: bool = False, mixed: bool = False, group: int = 1) -> Any:
    kernel, tiles = getattr(attention_async, f"attention_{name}"), TILES[name]
    switches = {"RAW": raw, "PAIRS": width // 4, "MIXED": mixed, "EXTRA": mixed}
    switches |= {"HEADS": 6, "GROUP": group, "WIDTH": width, "STAGES": tiles.stages}
    switches |= {"BLOCK_M": tiles.queries, "BLOCK_N": tiles.keys}
    switches = {key: value for key, value in switches.items() if key in kernel.arg_names}
    signature = {arg: "constexpr" if arg in switches else type_of(arg, name, width) for arg in kernel.arg_names}
    values = {(kernel.arg_names.index(arg),): value for arg, value in switches.items()}
    source = GluonASTSource(fn=kernel, signature=signature, constexprs=values)
    return compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": tiles.warps})


def type_of(arg: str, name: str, width: int) -> str:
    by_query = arg in ("q_desc", "out_desc", "grad_desc", "grad_q_desc")
    if arg.endswith("_desc"):
        rows = TILES[name].queries if by_query else TILES[name].keys
        return f"tensordesc<bf16[{rows}, {width}],{LAYOUT!r}>"
    pointers = {"first_ptr": "*i32", "end_ptr": "*i32", "out_ptr": "*bf16"}
    if arg.endswith("_ptr"):
        return pointers.get(arg, "*fp32")
    return "fp32" if arg.startswith("scale") else "i32"


def check(name: str, done: Any) -> None:
    ptx = done.asm["ptx"]
    assert tuple(ptx.count(f"wgmma.wait_group.sync.aligned {n};") for n in (1, 0)) == PENDING[name]
    assert "cp.async.bulk.tensor.2d" in ptx
    assert 2 * (done.metadata.shared + RESERVED_BYTES) <= SHARED_BYTES
    assert done.metadata.num_warps == 4  # 128 threads of at most 255 registers: two programs have enough


@pytest.mark.parametrize("name", TILES)
def test_kernels_compile_with_products_in_flight_and_two_programs_fit(name: str) -> None:
    check(name, for_hopper(name, 128))


@pytest.mark.slow
@pytest.mark.parametrize("name", TILES)
@pytest.mark.parametrize(("width", "group"), [(64, 1), (128, 3)])
def test_other_shapes_compile(name: str, width: int, group: int) -> None:
    check(name, for_hopper(name, width, group=group))


@pytest.mark.parametrize(
    ("name", "mixed"), [("query_gradient", False), ("key_gradient", True)], ids=["queries", "keys mixed"]
)
def test_endings_at_the_projections_compile(name: str, mixed: bool) -> None:
    check(name, for_hopper(name, 128, raw=True, mixed=mixed))
