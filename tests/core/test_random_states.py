"""Every random state comes back, half-drawn pairs included."""

import random
from typing import Any

import numpy as np
import pytest
import torch

from paceline.core.errors import RunError
from paceline.core.random_states import of_all_ranks, of_rank, random_states, set_random_states


def draw() -> list[Any]:
    return [torch.rand(3).tolist(), np.random.normal(size=3).tolist(), random.gauss(0, 1), random.random()]


def test_draws_go_on_where_they_were_kept() -> None:
    draw()  # three normal numbers and one: each generator keeps the second of a pair
    kept = random_states()
    expected = draw()
    draw()
    set_random_states(kept)
    assert draw() == expected


def test_each_rank_gets_its_own_and_a_new_one_nothing() -> None:
    own = [{"torch": torch.tensor([rank], dtype=torch.uint8)} for rank in range(11)]
    saved = of_all_ranks(own)
    assert [of_rank(saved, rank) for rank in range(11)] == own
    assert of_rank(saved, 11) == {}
    set_random_states({})


@pytest.mark.parametrize("position", [-1, 625, 2**40])
def test_a_position_past_numpys_words_is_refused(position: int) -> None:
    """numpy itself would go on reading behind them."""
    states = random_states()
    states["numpy"][-2] = position
    with pytest.raises(RunError, match=f"position is {position}"):
        set_random_states(states)
