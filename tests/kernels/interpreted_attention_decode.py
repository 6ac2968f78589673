"""Attention over rings of cells under Triton's interpreter, in fp32; run by test_attention_decode.py."""

import pytest
import torch

from kernels.decode_cases import check_parity, inputs_of, rank_slice
from model.lively import logits_without_cache, small
from paceline.evaluate.config import SamplingConfig
from paceline.evaluate.decode import Decoder
from paceline.evaluate.decode_graph import DecodeGraph, plan_cells
from paceline.evaluate.sampling import Writing
from paceline.kernels.attention_decode import attend_cells, mark_seen


@pytest.mark.parametrize(
    ("ring", "window", "shape"),
    [
        (64, 64, (2, 2, 16)),  # one part
        (200, 70, (3, 1, 16)),  # the last part is not full; of some nothing is seen
        (200, 70, (4, 2, 64)),
        (130, 130, (1, 1, 128)),
        (130, 70, (2, 1, 256)),
        (200, 70, (6, 3, 44)),  # a width between two powers of 2
        (2100, 65, (1, 1, 16)),  # more parts than are joined at a time
    ],
)
def test_rings_of_all_lengths(ring: int, window: int, shape: tuple[int, int, int]) -> None:
    """Empty, begun, at a part's last cell, just round, long past its end."""
    lengths = [0, 5, 63, ring, 3 * ring + 10]
    check_parity(lengths, ring, window, shape, device="cpu", dtype=torch.float32, tolerance=1e-6)  # fp32 sums


def test_large_scores_do_not_overflow() -> None:
    place = rank_slice([150], 200, 120, "cpu")
    q, k, v, keys, values = inputs_of(1, 200, (2, 2, 16), "cpu", torch.float32)
    found = attend_cells(1e4 * q, k, v, keys, values, mark_seen(place.cells, place.mask), 1.0)
    assert torch.isfinite(found).all()


def test_the_operator_writes_what_it_says_and_nothing_else() -> None:
    place = rank_slice([30, 80], 100, 64, "cpu")
    inputs = inputs_of(2, 100, (4, 2, 16), "cpu", torch.float32)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(attend_cells, (*inputs, mark_seen(place.cells, place.mask), 0.25), test_utils=tests)


def test_texts_of_different_lengths_go_on_and_stand_still_as_each_would_alone() -> None:
    """One past its ring's end; one stands still while the others are given a token."""
    model = small("blocks", head_dim=16, width=64)
    decoder = Decoder(model, windows=(128,), max_tokens=800, slots=3)
    graph, seen = DecodeGraph(decoder), []
    graph.plan = plan_cells
    for slot, length in enumerate((383, 3, 90)):
        prompt = torch.randint(0, 61, (1, length), generator=torch.Generator().manual_seed(slot))
        seen.append([*prompt[0].tolist(), int(decoder.feed(prompt, first=slot)[0, :61].argmax())])
        graph.begin(slot, seen[slot][-1])
    for live in ({0, 1, 2}, {0, 2}, {1, 2}):
        greedy = Writing(SamplingConfig(temperature=0.0))
        ids = graph.launch([greedy if slot in live else None for slot in range(3)]).wait()
        for slot in live:
            seen[slot].append(ids[slot])
            expected = logits_without_cache(model, torch.tensor([seen[slot][:-1]]), windows=(128,))[0, :61]
            torch.testing.assert_close(graph.logits[slot], expected, rtol=1e-4, atol=1e-4)
