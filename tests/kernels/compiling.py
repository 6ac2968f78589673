"""Ahead-of-time compilation of the attention kernels for sm_90, which needs no GPU."""

import functools
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from paceline.kernels import attention_ranges
from paceline.kernels.attention_ranges import BACKWARD_KEYS, BACKWARD_QUERIES, FORWARD, RAW_KEYS, RAW_QUERIES, Tiles

TILES = {"forward": FORWARD, "query_gradient": BACKWARD_QUERIES, "key_gradient": BACKWARD_KEYS}
RAW_TILES = {"query_gradient": RAW_QUERIES, "key_gradient": RAW_KEYS}


def compile_for_hopper(name: str, width: int, tiles: Tiles | None = None, *, heads: int = 6, raw: bool = False) -> Any:
    """The compiled kernel for bf16 inputs: `.asm["ptx"]`, `.metadata.shared` in bytes. `raw`: with the ending that
    carries gradients on to the projections."""
    kernel, tiles = getattr(attention_ranges, f"attention_{name}"), tiles or (RAW_TILES if raw else TILES)[name]
    constants = {
        "HEADS": heads,
        "GROUP": 1,
        "WIDTH": width,
        "BLOCK_M": tiles.queries,
        "BLOCK_N": tiles.keys,
        "TMA": tiles.tma,
        "PRECISION": "tf32",
        "RAW": raw,
        "PAIRS": width // 4,
        "MIXED": raw,
        "EXTRA": raw,
    }
    constants = {key: value for key, value in constants.items() if key in kernel.arg_names}
    type_of = functools.partial(_type, width=width, tiles=tiles, raw=raw)
    signature = {name: "constexpr" if name in constants else type_of(name) for name in kernel.arg_names}
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, kind in enumerate(signature.values())
        if kind.startswith("*") or kind == "i32"
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    if tiles.registers is not None:
        options["maxnreg"] = tiles.registers
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def _type(name: str, *, width: int, tiles: Tiles, raw: bool) -> str:
    rows = {"q": "queries", "out": "queries", "grad": "queries", "grad_q": "queries"}
    rows |= {"k": "keys", "v": "keys", "grad_k": "keys", "grad_v": "keys"}
    rows |= {"own": "keys", "extra": "keys", "grad_extra": "keys"}
    if name in rows:
        columns = width // 2 if raw and name in ("grad_q", "grad_k") else width
        return f"tensordesc<bf16[{getattr(tiles, rows[name])}, {columns}]>" if tiles.tma else "*bf16"
    if name in ("first_ptr", "end_ptr"):
        return "*i32"
    if name.endswith("_ptr"):
        return "*fp32"
    return "fp32" if name.startswith("scale") else "i32"
