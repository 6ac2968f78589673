"""Ahead-of-time compilation of the attention kernels, which needs no GPU."""

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from paceline.kernels import attention_ranges
from paceline.kernels.attention_ranges import BACKWARD_KEYS, BACKWARD_QUERIES, FORWARD

TILES = {"forward": FORWARD, "query_gradient": BACKWARD_QUERIES, "key_gradient": BACKWARD_KEYS}
MATRICES = ("q", "k", "v", "out", "grad", "grad_q", "grad_k", "grad_v")


def compile_for(capability: int, name: str, width: int) -> Any:
    """The compiled kernel for bf16 inputs and six heads: `.asm["ptx"]`, `.metadata.shared` in bytes."""
    kernel, tiles = getattr(attention_ranges, f"attention_{name}"), TILES[name]
    constants = {"HEADS": 6, "GROUP": 1, "WIDTH": width, "BLOCK_M": tiles.queries, "BLOCK_N": tiles.keys}
    constants |= {"PRECISION": "tf32"}
    signature = {name: "constexpr" if name in constants else _type(name) for name in kernel.arg_names}
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, kind in enumerate(signature.values())
        if kind.startswith("*") or kind == "i32"
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def _type(name: str) -> str:
    if name in MATRICES:
        return "*bf16"
    if name in ("first_ptr", "end_ptr"):
        return "*i32"
    if name.endswith("_ptr"):
        return "*fp32"
    return "fp32" if name.startswith("scale") else "i32"
