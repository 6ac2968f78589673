"""Loss by place in the document: places counted by hand, buckets that meet at the window, and nothing lost."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.evaluate.positions import OF_ANOTHER_SEQUENCE, LossByPlace, bucket_edges, places_in_sequence

CPU = torch.device("cpu")
CUT = OF_ANOTHER_SEQUENCE


def test_places_count_from_the_end_of_text_that_opened_the_document() -> None:
    tokens = torch.tensor([[5, 5, 0, 5, 5, 0, 0, 5], [0, 5, 5, 5, 5, 5, 5, 0]])
    assert places_in_sequence(tokens, end_of_text=0).tolist() == [
        [CUT, CUT, 0, 1, 2, 0, 0, 1],
        [0, 1, 2, 3, 4, 5, 6, 0],
    ]


@given(longest=st.integers(1, 100_000), window=st.none() | st.integers(1, 5_000))
def test_buckets_cover_every_place_once_and_none_straddles_the_window(longest: int, window: int | None) -> None:
    edges = bucket_edges(longest, window)
    assert edges == sorted(set(edges))
    assert edges[-1] >= longest
    assert window is None or window in edges or window > edges[-1]


def test_a_bucket_has_the_mean_of_its_tokens_and_documents_without_a_beginning_are_left_out() -> None:
    by_place = LossByPlace(100, window=24, device=CPU)
    by_place.add(torch.tensor([[1.0, 3.0, 50.0]]), torch.tensor([[0, 15, CUT]]))
    by_place.add(torch.tensor([7.0, 9.0, 11.0]), torch.tensor([23, 24, 99]))
    assert by_place.rows() == (
        (0, 15, True, 2, 2.0),
        (16, 23, True, 1, 7.0),
        (24, 47, False, 1, 9.0),
        (96, 191, False, 1, 11.0),
    )


@given(places=st.lists(st.integers(-1, 300), min_size=1, max_size=60))
def test_no_token_is_lost_or_counted_twice(places: list[int]) -> None:
    by_place = LossByPlace(301, window=100, device=CPU)
    by_place.add(torch.ones(len(places)), torch.tensor(places))
    assert sum(int(row[3] or 0) for row in by_place.rows()) == sum(place >= 0 for place in places)


def test_without_a_window_everything_is_inside() -> None:
    by_place = LossByPlace(1000, window=None, device=CPU)
    by_place.add(torch.ones(1), torch.tensor([999]))
    assert by_place.rows() == ((512, 1023, True, 1, pytest.approx(1.0)),)
