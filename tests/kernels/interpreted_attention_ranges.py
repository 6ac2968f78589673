"""Parity of the attention kernels with the dense definition in float64; run by test_attention_ranges.py."""

import math

import pytest
import torch
from torch import Tensor

from kernels.attention_cases import check_parity, qkv_of
from paceline.backends.ranges import ranges_of
from paceline.kernels import attention_ranges
from paceline.kernels.attention_ranges import HIDDEN, LOWEST, Tiles, attend_ranges
from paceline.model.masks import MaskRule

SMALL, WIDE = Tiles(queries=64, keys=128, warps=4, stages=1), Tiles(queries=128, keys=64, warps=4, stages=1)


@pytest.mark.parametrize(
    ("tiles", "unit", "documents", "window", "options"),
    [
        (SMALL, "blocks", True, 128, {}),  # a window of one block; two sequences with documents of their own
        (SMALL, "tokens_in_blocks", True, 200, {"width": 128, "sequences": 1}),
        (WIDE, "blocks", False, 256, {"tokens": 384, "sequences": 1}),
        (WIDE, "none", True, 1, {"sequences": 1}),
    ],
)
def test_values_and_gradients_are_those_of_the_dense_mask(
    monkeypatch: pytest.MonkeyPatch, tiles: Tiles, unit: str, documents: bool, window: int, options: dict[str, int]
) -> None:
    monkeypatch.setattr(attention_ranges, "SINGLE_PRECISION", tiles)
    check_parity(unit, documents=documents, window=window, dtype=torch.float32, device="cpu", tolerance=1e-6, **options)


@pytest.mark.parametrize(
    ("unit", "window", "options"),
    [
        ("blocks", 256, {"sequences": 1}),
        ("tokens", 70, {"kv_heads": 1, "joined": False}),  # rows that see nothing of their first tiles
    ],
)
def test_half_precision_operands_by_the_tiles_of_the_gpu(unit: str, window: int, options: dict[str, int]) -> None:
    check_parity(unit, documents=True, window=window, dtype=torch.float16, device="cpu", tolerance=2e-3, **options)


def test_a_row_that_has_seen_nothing_holds_no_weight() -> None:
    """On a GPU `score * scale - maximum` is not rounded in between, which the interpreter does. So hidden scores are
    judged here: whatever the scale, and however it is rounded, they leave a weight of 0, never inf."""
    for scale in (64**-0.5, 128**-0.5, 0.1, 1.0):
        product = HIDDEN.value * scale
        assert math.exp2(product - max(LOWEST.value, product)) == 0.0


def test_compiled_code_takes_the_kernels_as_one_node_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes and strides that the compiler gets are those that come, forward and backward."""
    monkeypatch.setattr(attention_ranges, "SINGLE_PRECISION", SMALL)
    qkv, grad = qkv_of(1, 128, 2, 1, 64, torch.float32, "cpu", joined=True)
    rule, ids, window = MaskRule(True, False, True), torch.zeros(1, 128, dtype=torch.int32), torch.tensor(128)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ranges = ranges_of(rule, ids, 128, window)
        return 2 * attend_ranges(q, k, v, ranges.first_key, ranges.end_query, scale=0.125)

    plain, compiled = attend(*qkv), torch.compile(attend, fullgraph=True, backend="aot_eager")(*qkv)
    expected = [plain, *torch.autograd.grad(plain, qkv, grad)]
    for a, b in zip([compiled, *torch.autograd.grad(compiled, qkv, grad)], expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.slow
@pytest.mark.parametrize(("queries", "keys"), [(64, 64), (64, 128), (128, 64), (128, 128), (32, 64)])
@pytest.mark.parametrize("unit", ["blocks", "tokens", "tokens_in_blocks", "none"])
@pytest.mark.parametrize("window", [2, 129, 384])  # at 1 the gradient of q is 0, and no error is relative to it
def test_every_way_to_cut_the_work(
    monkeypatch: pytest.MonkeyPatch, queries: int, keys: int, unit: str, window: int
) -> None:
    tiles = Tiles(queries=queries, keys=keys, warps=4, stages=1)
    monkeypatch.setattr(attention_ranges, "SINGLE_PRECISION", tiles)
    check_parity(unit, documents=True, window=window, dtype=torch.float32, device="cpu", tolerance=1e-6, tokens=384)
