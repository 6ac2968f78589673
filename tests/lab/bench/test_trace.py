"""From a profiler's trace to shares, on traces small enough to add up by hand."""

from typing import Any

import pytest

from paceline.lab.bench.classes import CLASSES, Shapes, Sizes, Work, class_of
from paceline.lab.bench.trace import read_trace, shares, top_kernels

R18 = Sizes(tokens=65_536, sequence_tokens=65_536, lm_head_rows=50_304, mlp_width=3_072)
T, D = R18.tokens, 768


@pytest.mark.parametrize(
    ("name", "operation", "shapes", "expected"),
    [
        ("nvjet_tst_256x128", "aten::mm", ((T, D), (D, 50_304)), "head_and_loss"),
        ("nvjet_tst_256x128", "aten::mm", ((50_304, T), (T, D)), "head_and_loss"),
        ("nvjet_tst_256x128", "aten::mm", ((2_048, D), (D, 50_304)), "head_and_loss"),  # a chunk of tokens
        ("nvjet_tst_256x128", "aten::mm", ((T, D), (D, 3_072)), "mlp"),
        ("sm90_xmma_gemm_bf16", "aten::addmm", ((T, D), (T, 3_072), (3_072, D)), "mlp"),
        ("nvjet_tst_256x128", "aten::mm", ((D, T), (T, D)), "attention_projections"),
        ("nvjet_tst_256x128", "aten::mm", ((T, D), (D, 2_304)), "attention_projections"),
        ("splitKreduce_kernel", "aten::mm", ((3_072, T), (T, D)), "mlp"),
        ("triton_tem_fused_flex_attention_backward_zeros_9", "", (), "attention"),
        ("void flash_fwd_kernel", "aten::_flash_attention_forward", (), "attention"),
        ("triton_per_fused_cumsum_eq_2", "", ((1, T),), "attention"),
        ("triton_red_fused__log_softmax_div_mul_tanh_40", "", (), "head_and_loss"),
        ("triton_poi_fused_div_mul_41", "", ((T, 50_304), (T,)), "head_and_loss"),
        ("triton_poi_fused_pow_relu_7", "", ((1, T, 3_072),), "mlp"),
        ("triton_poi_fused_mul_8", "", ((T, 3_072), (T, 3_072)), "mlp"),
        ("triton_red_fused__fused_rms_norm_add_3", "", ((1, T, D), (2,)), "norms_and_mixes"),
        ("triton_poi_fused_cat_neg_slice_5", "", ((1, T, 6, 128),), "norms_and_mixes"),
        ("triton_poi_fused__to_copy_12", "", ((D, 3_072),), "other"),  # a weight's cast
        ("triton_poi_fused_embedding_dense_backward_3", "", ((50_304, D), (1, T)), "other"),
        ("void at::native::vectorized_elementwise_kernel", "aten::add_", ((D, D), (D, D)), "other"),
        ("head_loss_rows", "", (), "head_and_loss"),
        ("mlp_product", "", (), "mlp"),
        ("muon_symmetric", "", (), "optimizer"),
        ("attention_forward", "", (), "attention"),
        ("norm_mix", "", (), "norms_and_mixes"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_kernel_is_known_by_its_name_and_the_shapes_of_what_launched_it(
    name: str, operation: str, shapes: Shapes, expected: str
) -> None:
    assert class_of(Work(name, operation, shapes), R18) == expected


def test_whatever_a_phase_launches_is_that_phase() -> None:
    assert class_of(Work("nvjet", "aten::bmm", ((8, D, D), (8, D, D)), phase="optimizer"), R18) == "optimizer"
    assert class_of(Work("Memcpy HtoD", phase="data"), R18) == "data"


def test_as_many_tokens_as_rows_of_the_head_are_not_taken_for_them() -> None:
    sizes = Sizes(tokens=2_048, sequence_tokens=2_048, lm_head_rows=2_048, mlp_width=384)
    assert class_of(Work("aten::mm", "aten::mm", ((2_048, 96), (96, 2_048))), sizes) == "head_and_loss"
    assert class_of(Work("aten::mm", "aten::mm", ((2_048, 96), (96, 384))), sizes) == "mlp"
    assert class_of(Work("aten::mm", "aten::mm", ((96, 2_048), (2_048, 96))), sizes) == "attention_projections"


def span(cat: str, name: str, start: float, length: float, **args: Any) -> dict[str, Any]:
    """An event as the profiler writes it; times in microseconds."""
    named = {"external": "External id", "dims": "Input Dims"}
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "ts": start,
        "dur": length,
        "tid": 1,
        "args": {named.get(key, key): value for key, value in args.items()},
    }


GPU_TRACE = [
    {"ph": "M", "name": "process_name", "args": {"name": "python"}},
    span("kernel", "before", 0, 50, correlation=1),
    span("user_annotation", "paceline: steps", 100, 1_000),
    span("user_annotation", "paceline: data", 100, 10),
    span("cuda_runtime", "cudaMemcpyAsync", 105, 1, correlation=2),
    span("gpu_memcpy", "Memcpy HtoD", 110, 20, correlation=2),
    span("cpu_op", "aten::mm", 120, 5, external=7, dims=[[T, D], [D, 3_072], []]),
    span("cuda_runtime", "cudaLaunchKernel", 122, 1, correlation=3),
    span("kernel", "nvjet", 200, 300, correlation=3, external=7),
    span("cuda_driver", "cuLaunchKernelEx", 130, 1, correlation=4),
    span("kernel", "triton_tem_fused_flex_attention_1", 400, 200, correlation=4),  # overlaps for 100
    span("gpu_user_annotation", "paceline: optimizer", 700, 200),
    span("user_annotation", "paceline: optimizer", 140, 10),
    span("cuda_runtime", "cudaLaunchKernel", 145, 1, correlation=5),
    span("kernel", "nvjet", 700, 200, correlation=5),
]


def test_shares_of_a_gpu_trace_add_up_with_overlaps_counted_once() -> None:
    found = shares(read_trace(GPU_TRACE), R18)
    expected = {"data": 0.02, "mlp": 0.3, "attention": 0.1, "optimizer": 0.2, "idle": 0.38}
    assert found == pytest.approx(dict.fromkeys(CLASSES, 0.0) | expected)
    assert list(found) == list(CLASSES)


def test_the_longest_kernels_come_first_by_name_and_class() -> None:
    rows = top_kernels(read_trace(GPU_TRACE), R18, steps=2, limit=3)
    assert [(row["name"], row["class"], row["calls"]) for row in rows] == [
        ("nvjet", "mlp", 0.5),
        ("nvjet", "optimizer", 0.5),
        ("triton_tem_fused_flex_attention_1", "attention", 0.5),
    ]
    assert [row["seconds"] for row in rows] == pytest.approx([150e-6, 100e-6, 50e-6])


def test_on_a_cpu_each_operation_counts_without_those_inside_it() -> None:
    trace = [
        span("user_annotation", "paceline: data", 10, 50),  # of a step before those that count
        span("user_annotation", "paceline: steps", 100, 100),
        span("user_annotation", "paceline: data", 100, 10),
        span("cpu_op", "aten::linear", 120, 40, dims=[[T, D], [50_304, D]]),
        span("cpu_op", "aten::t", 121, 5, dims=[[50_304, D]]),
        span("cpu_op", "aten::mm", 130, 30, dims=[[T, D], [D, 50_304]]),
        span("user_annotation", "paceline: optimizer", 170, 20),
        span("cpu_op", "aten::bmm", 170, 15, dims=[[2, D, D], [2, D, D]]),
    ]
    found = shares(read_trace(trace), R18)
    # linear's own 5 us know no (rows, depth) x (depth, columns) pair and see tokens
    expected = {"data": 0.1, "head_and_loss": 0.3, "norms_and_mixes": 0.05, "other": 0.05, "optimizer": 0.15}
    assert found == pytest.approx(dict.fromkeys(CLASSES, 0.0) | expected | {"idle": 0.35})
