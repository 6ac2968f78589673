"""Which tokens a step reads, against the records' numbers, a replay by hand, and what a permutation must be."""

import itertools
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import ConfigError
from paceline.data.order import Order, SequentialOrder, ShuffledOrder

LENGTHS = st.lists(st.integers(2, 4000), min_size=1, max_size=5).map(tuple)


def firsts(order: Order, sizes: Iterable[int]) -> list[list[int]]:
    """Shard and first token of each batch of so many sequences, from the start on."""
    sizes = list(sizes)
    return [
        order.spans(position, sequences)[0][0].tolist()
        for position, sequences in zip(itertools.accumulate(sizes, order.after, initial=0), sizes, strict=False)
    ]


def one_pass(order: Order, sequences: int) -> int:
    """Steps of one size in which no token is read twice."""
    reached = itertools.accumulate(itertools.repeat(sequences), order.after, initial=0)
    return len(list(itertools.takewhile(lambda position: position <= order.pass_tokens, reached))) - 1


def replay_record_18(lengths: tuple[int, ...], batches: list[int]) -> list[list[int]]:
    """The loader of record 18, walked: before reading G tokens, base + G + 1 >= length moves on to the next shard."""
    shard, base, read = 0, 0, []
    for tokens in batches:
        if base + tokens + 1 >= lengths[shard]:
            shard, base = (shard + 1) % len(lengths), 0
        read.append([shard, base])
        base += tokens
    return read


@pytest.mark.parametrize(("length", "batches"), [(10_000_000, 19), (100_000_000, 190)])
def test_batches_of_a_full_shard_are_the_records(length: int, batches: int) -> None:
    order = SequentialOrder((length, length), sequence_tokens=65_536)
    assert one_pass(order, 8) == 2 * batches
    read = firsts(order, [8] * (2 * batches + 1))
    assert read[batches - 1] == [0, (batches - 1) * 524_288]
    assert read[batches] == [1, 0]
    assert read[2 * batches] == [0, 0]  # wraps to the first shard


def test_the_track_is_read_once_in_266_steps() -> None:
    assert one_pass(SequentialOrder((10_000_000,) * 14, sequence_tokens=65_536), 8) == 266


@given(lengths=LENGTHS, sizes=st.lists(st.integers(1, 4), min_size=1, max_size=60), tokens=st.integers(1, 64))
def test_sequential_is_record_18_walked_step_by_step(lengths: tuple[int, ...], sizes: list[int], tokens: int) -> None:
    lengths = tuple(length + 4 * tokens for length in lengths)  # each holds a batch; record 18 expects that
    order = SequentialOrder(lengths, tokens)
    constant = [sizes[0]] * (2 * one_pass(order, sizes[0]) + 3)
    for batches in (constant, sizes):
        assert firsts(order, batches) == replay_record_18(lengths, [sequences * tokens for sequences in batches])


def test_the_rows_of_a_sequential_batch_are_contiguous() -> None:
    spans, after = SequentialOrder((100,), sequence_tokens=10).spans(30, 3)
    assert spans.tolist() == [[0, 30], [0, 40], [0, 50]]
    assert after == 60


@pytest.mark.parametrize(("length", "steps"), [(31, 0), (32, 1), (61, 1), (62, 2)])
def test_the_edge_of_a_shard_is_the_rule_s(length: int, steps: int) -> None:
    """G = 30: 31 tokens would do for a batch and its targets, the rule wants one more."""
    read = firsts(SequentialOrder((length, 1000), sequence_tokens=10), [3] * (steps + 1))
    assert read == [[0, 30 * step] for step in range(steps)] + [[1, 0]]


def test_a_shard_too_short_for_a_batch_is_passed_over() -> None:
    order = SequentialOrder((100, 5, 100), sequence_tokens=10)
    assert [shard for shard, _ in firsts(order, [3] * 7)] == [0, 0, 0, 2, 2, 2, 0]


@pytest.mark.parametrize("order", [SequentialOrder((20, 9), 10), ShuffledOrder((20, 9), 10, seed=0)])
def test_shards_that_hold_no_batch_at_all_are_refused(order: Order) -> None:
    order.check(1)
    with pytest.raises(ConfigError, match=r"--batch.tokens 30"):
        order.check(3)


@given(
    order=st.sampled_from([SequentialOrder((900, 70, 700), 16), ShuffledOrder((900, 70, 700), 16, seed=1)]),
    sizes=st.lists(st.integers(1, 8), max_size=40),
)
def test_the_position_after_a_batch_is_known_without_reading_it(order: Order, sizes: list[int]) -> None:
    position = 0
    for sequences in sizes:
        assert order.after(position, sequences) == (position := order.spans(position, sequences)[1])


@given(
    lengths=LENGTHS,
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    tokens=st.integers(9, 300),
    seed=st.integers(0, 2**63 - 1),
)
def test_an_epoch_holds_every_sequence_once_and_inside_its_shard(
    lengths: tuple[int, ...], sizes: list[int], tokens: int, seed: int
) -> None:
    """Whatever the sizes of the batches are."""
    order = ShuffledOrder((*lengths, 5 * tokens + 1), tokens, seed)
    per_epoch = order.sequences_per_epoch
    assert per_epoch == sum((length - 1) // tokens for length in order.lengths)
    position, parts, turns = 0, list[np.ndarray](), itertools.cycle(sizes)
    while position < 2 * order.pass_tokens:
        spans, position = order.spans(position, next(turns))
        parts.append(spans)
    read = np.concatenate(parts)
    for epoch in range(2):
        spans = read[epoch * per_epoch : (epoch + 1) * per_epoch]
        for shard, length in enumerate(order.lengths):
            starts = np.sort(spans[spans[:, 0] == shard, 1])
            assert len(starts) == (length - 1) // tokens
            assert np.all(np.diff(starts) == tokens)  # none twice, none left out
            assert np.all(starts >= 0)
            assert np.all(starts + tokens < length)  # the last target is inside too


def test_epochs_and_seeds_have_orders_and_grids_of_their_own() -> None:
    """Two orders of 200 sequences agree in one place on average; grids of 100 agree once in a hundred epochs."""
    order = ShuffledOrder((10_100, 10_099), 100, seed=1)
    other = ShuffledOrder((10_100, 10_099), 100, seed=2)
    first, second, third = (
        each.spans(epoch * each.pass_tokens, 200)[0] for each, epoch in ((order, 0), (order, 1), (other, 0))
    )
    for left, right in ((first, second), (first, third), (second, third)):
        assert np.sum(np.all(left // 100 == right // 100, axis=1)) < 10
        assert set(left[:, 1] % 100) != set(right[:, 1] % 100)


def test_a_shuffled_step_is_computed_directly() -> None:
    """A step far into the run equals the same step of an order that read everything before it."""
    walked, position = ShuffledOrder((5000, 3000), 64, seed=5), 0
    for _ in range(200):
        last, position = walked.spans(position, 3)
    assert np.array_equal(ShuffledOrder((5000, 3000), 64, seed=5).spans(199 * 3 * 64, 3)[0], last)


def test_the_shuffle_does_not_touch_the_global_random_state() -> None:
    before = np.random.get_state()[1].copy()
    ShuffledOrder((5000,), 64, seed=5).spans(0, 3)
    assert np.array_equal(np.random.get_state()[1], before)


def test_the_shuffle_is_the_same_in_every_version() -> None:
    """Frozen: a resumed run must go on in the order it began with, whatever numpy is installed."""
    spans, _ = ShuffledOrder((1000, 700), 100, seed=3).spans(2 * 4 * 100, 4)
    assert spans.tolist() == [[1, 335], [1, 135], [0, 168], [0, 568]]
