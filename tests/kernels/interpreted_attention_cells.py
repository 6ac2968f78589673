"""Attention over rings of cells under Triton's interpreter, in fp32; run by test_attention_cells.py."""

import pytest
import torch

from kernels.cells_cases import check_parity, inputs_of, place_of
from paceline.kernels.attention_cells import attend_cells, mark_seen


@pytest.mark.parametrize(
    ("ring", "window", "shape"),
    [
        (64, 64, (2, 2, 16)),  # one part
        (200, 70, (3, 1, 16)),  # the last part is not full; of some nothing is seen
        (200, 70, (4, 2, 64)),
        (130, 130, (1, 1, 128)),
        (130, 70, (2, 1, 256)),
        (2100, 65, (1, 1, 16)),  # more parts than are joined at a time
    ],
)
def test_rings_of_all_lengths(ring: int, window: int, shape: tuple[int, int, int]) -> None:
    """Empty, begun, at a part's last cell, just round, long past its end."""
    lengths = [0, 5, 63, ring, 3 * ring + 10]
    check_parity(lengths, ring, window, shape, device="cpu", dtype=torch.float32, tolerance=1e-6)  # fp32 sums


def test_large_scores_do_not_overflow() -> None:
    place = place_of([150], 200, 120, "cpu")
    q, k, v, keys, values = inputs_of(1, 200, (2, 2, 16), "cpu", torch.float32)
    found = attend_cells(1e4 * q, k, v, keys, values, mark_seen(place.cells, place.mask), 1.0)
    assert torch.isfinite(found).all()


def test_the_operator_writes_what_it_says_and_nothing_else() -> None:
    place = place_of([30, 80], 100, 64, "cpu")
    inputs = inputs_of(2, 100, (4, 2, 16), "cpu", torch.float32)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(attend_cells, (*inputs, mark_seen(place.cells, place.mask), 0.25), test_utils=tests)
