"""Attention over rings of cells agrees with its plain twin: interpreted here, compiled for a Hopper GPU, and on one."""

import re
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from kernels.decode_cases import check_parity, inputs_of, rank_slice
from kernels.interpreter import run_interpreted
from paceline.kernels import attention_decode
from paceline.kernels.attention_decode import attend_cells, mark_seen

SCALARS = {"scale_log2": "fp32", "ring": "i32", "q_stride": "i32", "k_stride": "i32", "v_stride": "i32", "parts": "i32"}
FP32 = ("mixed_ptr", "largest_ptr", "total_ptr")


@pytest.mark.journey
def test_interpreted_kernels_agree_with_float64() -> None:
    run_interpreted("interpreted_attention_decode.py")


@pytest.mark.parametrize("width", [16, 128, 256])
@pytest.mark.parametrize("kernel", [attention_decode.attention_decode_part, attention_decode.attention_decode_join])
def test_the_kernels_compile_for_hopper(kernel: Any, width: int) -> None:
    """Tiles are loaded by 16 bytes a thread and stay as they were loaded: another layout costs six times the exchanges
    between threads."""
    constants = {"GROUP": 2, "WIDTH": width, "COLUMNS": width, "CELLS": attention_decode.cells_of_part(width)}
    constants |= {"ALL_PARTS": 32, "PARTS": attention_decode.PARTS}
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    types = SCALARS | dict.fromkeys(FP32, "*fp32") | {"seen_ptr": "*u8"}
    signature = {name: "constexpr" if name in constants else types.get(name, "*bf16") for name in kernel.arg_names}
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, kind in enumerate(signature.values())
        if kind.startswith("*") or kind == "i32"
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": attention_decode.WARPS}
    done = compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert "ld.global.v4.b32" in done.asm["ptx"]
    tile = rf"tensor<{constants.get('CELLS', attention_decode.PARTS)}x{width}x"
    assert not re.search(rf"convert_layout .*{tile}", done.asm["ttgir"])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11), (torch.float32, 5e-6)]
)  # sums are in fp32; the output is rounded once
@pytest.mark.parametrize("shape", [(6, 6, 128), (8, 2, 64), (4, 1, 256), (2, 2, 16), (6, 3, 44)])
def test_rings_on_a_gpu(shape: tuple[int, int, int], dtype: torch.dtype, tolerance: float) -> None:
    for ring, window in ((2048, 1792), (200, 70), (4000, 4000)):
        lengths = [0, 5, 63, 700, ring, 3 * ring + 10]
        check_parity(lengths, ring, window, shape, device="cuda", dtype=dtype, tolerance=tolerance)


@pytest.mark.gpu
def test_launches_repeat_to_the_bit_on_a_gpu() -> None:
    """64 texts; every launch writes the same cells again."""
    place = rank_slice([17 * n for n in range(64)], 2048, 1792, "cuda")
    inputs = inputs_of(64, 2048, (6, 6, 128), "cuda", torch.bfloat16)
    seen = mark_seen(place.cells, place.mask)
    first = attend_cells(*inputs, seen, 0.1)
    assert all(torch.equal(attend_cells(*inputs, seen, 0.1), first) for _ in range(20))
