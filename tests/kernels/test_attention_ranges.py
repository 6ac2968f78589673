"""Attention over intervals of keys: the intervals are the mask, the kernels agree with the dense definition under
Triton's interpreter, and they compile for the GPU that they are written for."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from kernels.interpreter import run_interpreted
from model.mask_cases import B, Case, cases, expected
from paceline.backends.ranges import ranges_of
from paceline.model.masks import block_lists

pytest.importorskip("triton")


@settings(max_examples=60)
@given(cases())
def test_the_ranges_are_the_mask_seen_from_queries_and_from_keys(case: Case) -> None:
    ranges, mask, position = ranges_of(*case.arguments()), expected(case), np.arange(case.tokens)
    first, end = ranges.first_key.numpy()[:, :, None], ranges.end_query.numpy()[:, None, :]
    q, k = position[None, :, None], position[None, None, :]
    assert np.array_equal((first <= k) & (k <= q), mask)
    assert np.array_equal((k <= q) & (q < end), mask)
    assert (np.diff(first, axis=1) >= 0).all()
    assert (np.diff(end, axis=2) >= 0).all()


@settings(max_examples=60)
@given(cases())
def test_the_ranges_visit_the_blocks_of_the_lists_and_test_the_same(case: Case) -> None:
    """Block row i visits the blocks from the first key of its first query to its own; those from the first key of its
    last query on, up to its own, are full. Seen from key block j likewise."""
    ranges, lists = ranges_of(*case.arguments()), block_lists(*case.arguments())
    first, end = ranges.first_key, ranges.end_query
    i, j = (torch.arange(case.tokens // B).view(shape) for shape in ((1, -1, 1), (1, 1, -1)))
    by_query = (first[:, ::B, None] // B <= j) & (j <= i)
    full_by_query = ((first[:, B - 1 :: B, None] + B - 1) // B <= j) & (j < i)
    by_key = (j <= i) & (i * B < end[:, None, B - 1 :: B])
    full_by_key = (j < i) & (i < end[:, None, ::B] // B)
    for visited, full in ((by_query, full_by_query), (by_key, full_by_key)):
        assert torch.equal(visited, lists.full | lists.partial)
        assert torch.equal(full, lists.full)


def test_the_kernels_agree_with_the_dense_definition() -> None:
    run_interpreted("interpreted_attention_ranges.py")


@pytest.mark.slow
def test_the_kernels_agree_however_the_work_is_cut() -> None:
    run_interpreted("interpreted_attention_ranges.py", "-m", "slow", "--timeout", "1800")


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("name", ["forward", "query_gradient", "key_gradient"])
@pytest.mark.parametrize(("capability", "product"), [(80, "mma.sync"), (89, "mma.sync"), (90, "wgmma"), (100, "mma")])
def test_the_kernels_compile_for_every_generation(capability: int, product: str, name: str, width: int) -> None:
    """With products in the matrix units, within the 99 KiB of shared memory that the smallest of these GPUs has."""
    from kernels.compiling import compile_for

    compiled = compile_for(capability, name, width)
    assert product in compiled.asm["ptx"]
    assert compiled.metadata.shared <= 99 * 1024
