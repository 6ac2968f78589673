"""The fused kernels agree with their plain twins: interpreted here, compiled for the GPU they are for, and on one."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from kernels.fused_cases import head_errors, heads_errors, mlp_errors, relative_error
from kernels.interpreter import run_interpreted
from paceline.backends.newton_schulz_fused import orthogonalise_symmetric
from paceline.kernels import gemm_epilogue, head_loss_fused, qkv_rope, row_update, symmetric_fused
from paceline.optim.newton_schulz import orthogonalise
from paceline.optim.rule import Event
from paceline.optim.rules.adam_rows import update_plainly
from paceline.settings.groups import GroupSettings

SHARED_BYTES, RESERVED_BYTES = 233_472, 1_024
"""Of one multiprocessor of an H100 or H200, and what each program on it costs beside its own."""
BF16 = {"device": "cuda", "dtype": torch.bfloat16}


@pytest.mark.journey
def test_interpreted_kernels_agree_with_float64() -> None:
    run_interpreted("interpreted_fused.py")


@pytest.mark.slow
def test_a_model_by_interpreted_kernels_is_the_plain_one() -> None:
    run_interpreted("interpreted_fused.py", "-m", "slow", "--timeout", "600")


def for_hopper(kernel: Any, types: dict[str, str], constants: dict[str, Any], *, warps: int, stages: int = 3) -> Any:
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    return compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, "num_stages": stages})


def test_products_compile_for_the_matrix_units_and_fit_the_shared_memory() -> None:
    tiles = gemm_epilogue.TILES
    blocks = {"a_desc": (tiles.m, tiles.k), "b_desc": (tiles.n, tiles.k), "c_desc": (tiles.m, tiles.n // 2)}
    types = {name: f"tensordesc<bf16[{rows},{columns}]>" for name, (rows, columns) in blocks.items()}
    types |= {"rows": "i32", "columns": "i32", "depth": "i32"}
    constants = {"BLOCK_M": tiles.m, "BLOCK_N": tiles.n, "BLOCK_K": tiles.k, "GROUP_M": tiles.group, "PROGRAMS": 132}
    done = for_hopper(gemm_epilogue.mlp_product, types, constants, warps=tiles.warps, stages=tiles.stages)
    assert "wgmma.mma_async" in done.asm["ptx"]
    assert done.metadata.shared + RESERVED_BYTES <= SHARED_BYTES


def test_the_update_by_rows_compiles() -> None:
    pointers = {
        "ids_ptr": "*i64",
        "order_ptr": "*i64",
        "rows_ptr": "*bf16",
        "param_ptr": "*bf16",
        "square_ptr": "*fp32",
    }
    types = pointers | {"last_ptr": "*i32", "now_ptr": "*fp32", "skip_ptr": "*i1", "count": "i32", "width": "i32"}
    types |= dict.fromkeys(("lr", "beta2", "log_beta2", "eps", "decay"), "fp32")
    sizes = {"WIDTH": 1024, "AT_ONCE": row_update.AT_ONCE}
    assert "st.global" in for_hopper(row_update.adam_row, types, sizes, warps=row_update.WARPS).asm["ptx"]


def test_symmetric_products_compile_for_the_matrix_units() -> None:
    tile, depth = symmetric_fused.TILE, symmetric_fused.DEPTH
    square = f"tensordesc<bf16[{tile},{tile}]>"
    types = {"x_desc": f"tensordesc<bf16[{tile},{depth}]>", "base_desc": square, "out_desc": square}
    types |= {"rows": "i32", "depth": "i32", "alpha": "fp32", "beta": "fp32"}
    constants = {"ADDS": True, "TILE": tile, "DEPTH": depth}
    kernel, warps, stages = symmetric_fused.muon_symmetric, symmetric_fused.WARPS, symmetric_fused.STAGES
    done = for_hopper(kernel, types, constants, warps=warps, stages=stages)
    assert "wgmma.mma_async" in done.asm["ptx"]
    assert done.metadata.shared + RESERVED_BYTES <= SHARED_BYTES


@pytest.mark.parametrize("capped", [True, False])
def test_the_loss_kernel_compiles(capped: bool) -> None:
    types = {"logits_ptr": "*bf16", "targets_ptr": "*i64", "losses_ptr": "*fp32"}
    types |= {"vocab": "i32", "cap": "fp32", "lift": "fp32", "ignore": "i32"}
    constants = {"CAPPED": capped, "SHIFTED": not capped, "WITH_GRADIENT": True, "HARDWARE": True}
    constants |= {"BLOCK": head_loss_fused.BLOCK, "TAIL": 2048}
    for_hopper(head_loss_fused.head_loss_rows, types, constants, warps=head_loss_fused.WARPS)


def test_the_kernel_of_targets_compiles() -> None:
    types = dict.fromkeys(("slopes_ptr", "x_ptr", "weight_ptr", "shared_x_ptr"), "*bf16")
    types |= {"targets_ptr": "*i64", "sums_ptr": "*fp32", "losses_ptr": "*fp32", "shares_ptr": "*fp32", "cap": "fp32"}
    types["lift"] = "fp32"
    types |= dict.fromkeys(("rows", "parts", "vocab", "width", "ignore"), "i32")
    constants = {"WITH_GRADIENT": True, "HARDWARE": True, "PARTS": 512, "WIDTH": 1024}
    constants["ROWS"] = head_loss_fused.TARGET_ROWS
    for_hopper(head_loss_fused.head_loss_targets, types, constants, warps=head_loss_fused.TARGET_WARPS)


@pytest.mark.parametrize("kernel", [qkv_rope.heads_forward, qkv_rope.heads_backward])
def test_the_kernels_of_heads_compile(kernel: Any) -> None:
    wide = ("mix_ptr", "cos_ptr", "sin_ptr", "scale_ptr", "grad_mix_ptr")
    types = {name: "*fp32" if name in wide else "*bf16" for name in kernel.arg_names if name.endswith("_ptr")}
    types |= {"rows": "i32", "sequence": "i32", "eps": "fp32"}
    types = {name: kind for name, kind in types.items() if name in kernel.arg_names}
    constants = {"HEADS": 6, "NORMED": 12, "KV_HEADS": 6, "HALF": 64, "PAIRS": 32, "MIXED": True, "EXTRA": True}
    constants["TOKENS"] = qkv_rope.TOKENS
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    for_hopper(kernel, types, constants, warps=qkv_rope.WARPS)


@pytest.mark.gpu
@pytest.mark.parametrize("cap", [None, 15.0])
def test_head_and_loss_on_a_gpu(cap: float | None) -> None:
    assert max(head_errors(2_000, 12_288, cap, 0.0 if cap is None else 5.0, **BF16)) < 1e-2
    assert max(head_errors(20_000, 50_304, cap, **BF16)) < 1e-2  # bf16 logits, and bf16 gradients of them
    assert max(head_errors(1_000, 50_264, cap, **BF16)) < 1e-2  # the last tile of the product is not full
    assert max(head_errors(1_000, 50_257, cap, **BF16)) < 1e-2  # rows that the copy engine cannot address


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "columns"), [(768, 768), (3_072, 768), (768, 3_072)])
def test_symmetric_products_on_a_gpu(rows: int, columns: int) -> None:
    G = torch.randn(4, rows, columns, device="cuda")
    settings = {"steps": 5, "association": "polynomial_first", "norm_of": "rounded"}
    fast = orthogonalise_symmetric(G, dtype=torch.bfloat16, **settings)
    plain = orthogonalise(G, dtype=torch.bfloat16, **settings)
    exact = orthogonalise(G.double(), dtype=torch.float64, **settings)
    assert relative_error(fast, exact) < 1.5 * relative_error(plain, exact)  # no worse than bf16 products are


@pytest.mark.gpu
def test_mlp_on_a_gpu() -> None:
    assert max(mlp_errors(5_000, 768, 3_072, **BF16)) < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("value_embed", [True, False])
def test_heads_on_a_gpu(value_embed: bool) -> None:
    for shape in ((6, 6, 128), (6, 3, 64)):
        found = heads_errors(
            shape,
            rotary_fraction=0.5,
            mixed=True,
            value_embed=value_embed,
            sequence=4_096,
            sequences=2,
            depth=768,
            **BF16,
        )
        assert max(found) < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 768])
def test_one_launch_updates_rows_as_the_plain_twin_on_the_gpu(width: int) -> None:
    """Frequent ids and rare ones, as hashed n-grams have them, bf16 tables, a third of the places taken by nobody."""
    drawn = torch.randn(4096, device="cuda").abs() * 300
    ids, rows = drawn.long(), torch.randn(4096, width, device="cuda").bfloat16()
    ids[2731:], rows[2731:] = -1, 0.0
    start = torch.randn(2000, width, device="cuda").bfloat16(), torch.rand(2000, device="cuda")
    last = torch.randint(3, (2000,), dtype=torch.int32, device="cuda")
    settings = GroupSettings(lr=0.1, beta1=0.0, beta2=0.9, eps=1e-8, weight_decay=0.3, momentum=0.0, moves=True)
    event = Event(settings=settings, step=5, skip=torch.zeros((), dtype=torch.bool, device="cuda"))
    found, plain = ([part.clone() for part in (*start, last)] for _ in range(2))
    row_update.update_rows(*found, ids, rows, event)
    update_plainly(*plain, ids, rows, event)
    assert relative_error(found[0].float() - start[0].float(), plain[0].float() - start[0].float()) < 2e-2
    torch.testing.assert_close(found[1], plain[1], rtol=1e-4, atol=1e-6)
    assert torch.equal(found[2], plain[2])
