"""Which tokens a step reads, against the records' numbers, a replay by hand, and what a permutation must be."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import ConfigError
from paceline.data.order import SequentialOrder, ShuffledOrder

LENGTHS = st.lists(st.integers(2, 4000), min_size=1, max_size=5).map(tuple)


def replay_record_18(lengths: tuple[int, ...], batch_tokens: int, steps: int) -> list[tuple[int, int]]:
    """The loader of record 18, walked: before reading, base + G + 1 >= length moves on to the next shard."""
    shard, base, read = 0, 0, []
    for _ in range(steps):
        if base + batch_tokens + 1 >= lengths[shard]:
            shard, base = (shard + 1) % len(lengths), 0
        read.append((shard, base))
        base += batch_tokens
    return read


@pytest.mark.parametrize(("length", "batches"), [(10_000_000, 19), (100_000_000, 190)])
def test_batches_of_a_full_shard_are_the_records(length: int, batches: int) -> None:
    order = SequentialOrder((length, length), sequences=8, sequence_tokens=65_536)
    assert order.steps_per_pass == 2 * batches
    assert order.windows(batches - 1)[0].tolist() == [0, (batches - 1) * 524_288]
    assert order.windows(batches)[0].tolist() == [1, 0]
    assert order.windows(2 * batches)[0].tolist() == [0, 0]  # wraps to the first shard


def test_the_track_is_read_once_in_266_steps() -> None:
    assert SequentialOrder((10_000_000,) * 14, sequences=8, sequence_tokens=65_536).steps_per_pass == 266


@given(lengths=LENGTHS, sequences=st.integers(1, 4), tokens=st.integers(1, 64))
def test_sequential_is_record_18_walked_step_by_step(lengths: tuple[int, ...], sequences: int, tokens: int) -> None:
    lengths = tuple(length + sequences * tokens for length in lengths)  # each holds a batch; record 18 expects that
    order = SequentialOrder(lengths, sequences, tokens)
    steps = 2 * order.steps_per_pass + 3
    assert [tuple(order.windows(s)[0].tolist()) for s in range(steps)] == replay_record_18(
        lengths, sequences * tokens, steps
    )


def test_the_rows_of_a_sequential_batch_are_contiguous() -> None:
    order = SequentialOrder((100,), sequences=3, sequence_tokens=10)
    assert order.windows(1).tolist() == [[0, 30], [0, 40], [0, 50]]


@pytest.mark.parametrize(("length", "steps"), [(31, 0), (32, 1), (61, 1), (62, 2)])
def test_the_edge_of_a_shard_is_the_rule_s(length: int, steps: int) -> None:
    """G = 30: 31 tokens would do for a batch and its targets, the rule wants one more."""
    assert SequentialOrder((length, 1000), sequences=3, sequence_tokens=10).windows(steps)[0].tolist() == [1, 0]


def test_a_shard_too_short_for_a_batch_is_passed_over() -> None:
    order = SequentialOrder((100, 5, 100), sequences=3, sequence_tokens=10)
    assert [order.windows(step)[0, 0] for step in range(7)] == [0, 0, 0, 2, 2, 2, 0]


@pytest.mark.parametrize("order", [SequentialOrder, lambda *rest: ShuffledOrder(*rest, seed=0)])
def test_shards_that_hold_no_batch_at_all_are_refused(order: type[SequentialOrder]) -> None:
    with pytest.raises(ConfigError, match=r"--batch.tokens 30"):
        order((20, 9), 3, 10)


@given(lengths=LENGTHS, sequences=st.integers(1, 5), tokens=st.integers(9, 300), seed=st.integers(0, 2**63 - 1))
def test_an_epoch_holds_every_window_once_and_inside_its_shard(
    lengths: tuple[int, ...], sequences: int, tokens: int, seed: int
) -> None:
    lengths = (*lengths, sequences * tokens + 1)
    order = ShuffledOrder(lengths, sequences, tokens, seed)
    per_epoch = order.windows_per_epoch
    assert per_epoch == sum((length - 1) // tokens for length in lengths)
    read = np.concatenate([order.windows(step) for step in range(2 * per_epoch // sequences + 1)])
    for epoch in range(2):
        windows = read[epoch * per_epoch : (epoch + 1) * per_epoch]
        for shard, length in enumerate(lengths):
            starts = np.sort(windows[windows[:, 0] == shard, 1])
            assert len(starts) == (length - 1) // tokens
            assert np.all(np.diff(starts) == tokens)  # none twice, none left out
            assert np.all(starts >= 0)
            assert np.all(starts + tokens < length)  # the last target is inside too


def test_epochs_and_seeds_have_orders_and_grids_of_their_own() -> None:
    """Two orders of 200 windows agree in one place on average; grids of 100 agree once in a hundred epochs."""
    order = ShuffledOrder((10_100, 10_099), 1, 100, seed=1)
    other = ShuffledOrder((10_100, 10_099), 1, 100, seed=2)
    first, second, third = (
        np.concatenate([each.windows(step) for step in range(200 * epoch, 200 * (epoch + 1))])
        for each, epoch in ((order, 0), (order, 1), (other, 0))
    )
    for left, right in ((first, second), (first, third), (second, third)):
        assert np.sum(np.all(left // 100 == right // 100, axis=1)) < 10
        assert set(left[:, 1] % 100) != set(right[:, 1] % 100)


def test_a_shuffled_step_is_computed_directly() -> None:
    """A step far into the run equals the same step of an order that read everything before it."""
    walked = ShuffledOrder((5000, 3000), 3, 64, seed=5)
    for step in range(200):
        last = walked.windows(step)
    assert np.array_equal(ShuffledOrder((5000, 3000), 3, 64, seed=5).windows(199), last)


def test_the_shuffle_does_not_touch_the_global_random_state() -> None:
    before = np.random.get_state()[1].copy()
    ShuffledOrder((5000,), 3, 64, seed=5).windows(0)
    assert np.array_equal(np.random.get_state()[1], before)


def test_the_shuffle_is_the_same_in_every_version() -> None:
    """Frozen: a resumed run must go on in the order it began with, whatever numpy is installed."""
    windows = ShuffledOrder((1000, 700), 4, 100, seed=3).windows(2)
    assert windows.tolist() == [[1, 335], [1, 135], [0, 168], [0, 568]]
