"""Batches: the same tokens for any number of ranks and any number of restarts."""

from dataclasses import replace
from itertools import islice, repeat
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.samples import BATCH, COUNTING, counting_corpus, counting_tokens, in_memory
from paceline.core.errors import ConfigError, DataError
from paceline.core.units import BLOCK_TOKENS
from paceline.data.batches import Cursor, batches, check_data, position_after_steps
from paceline.data.corpus import Batch, Corpus
from paceline.data.shards import manifest_path
from paceline.evaluate.validation import validation_batches
from paceline.settings.data import BatchConfig, DataConfig
from paceline.text.dataset import open_corpus
from paceline.text.shard_writer import write_shard

EOT = 0
Kind = Literal["sequential", "shuffled"]


def documents(lengths: list[int]) -> np.ndarray:
    """A shard of documents: end-of-text, then tokens that count up from 1 in each."""
    parts = [np.arange(length) for length in lengths]
    return np.concatenate(parts).astype(np.uint16)


def first_batches(corpus: Corpus, data: DataConfig, batch: BatchConfig, count: int, **place: int) -> list[Batch]:
    return [found for found, _ in islice(batches(corpus, data, batch, repeat(batch.sequences), seed=4, **place), count)]


def test_sequential_batches_equal_a_hand_computation() -> None:
    found = first_batches(COUNTING, DataConfig(), BATCH, 9)
    expected = [(0, 128 * n) for n in range(7)] + [(1000, 128 * n) for n in range(2)]  # 898 // 128 = 7 from shard 0
    for batch, (shard, base) in zip(found, expected, strict=True):
        flat = shard + base + np.arange(128)
        assert np.array_equal(batch.tokens, flat.reshape(8, 16))
        assert np.array_equal(batch.targets, flat.reshape(8, 16) + 1)


def test_dtypes_are_those_the_model_takes() -> None:
    batch = first_batches(COUNTING, DataConfig(), BATCH, 1)[0]
    assert (batch.tokens.dtype, batch.targets.dtype) == (np.int32, np.int64)


@given(
    order=st.sampled_from(["sequential", "shuffled"]),
    aligned=st.booleans(),
    step=st.integers(0, 10**6),
    world=st.sampled_from([2, 4, 8]),
    seed=st.integers(0, 2**63 - 1),
)
def test_world_size_never_changes_the_global_batch(
    order: Kind, aligned: bool, step: int, world: int, seed: int
) -> None:
    data = DataConfig(order=order, align_documents=aligned)
    corpus = in_memory(documents([300, 5, 700, 129] * 4), documents([90] * 30))
    batch = BatchConfig(tokens=8 * BLOCK_TOKENS, sequence_tokens=BLOCK_TOKENS)

    def rows(rank: int, world: int) -> np.ndarray:
        start = Cursor(step * BLOCK_TOKENS)
        found, _ = next(batches(corpus, data, batch, [8], seed=seed, start=start, rank=rank, world=world))
        return np.stack([found.tokens, found.targets], axis=1)

    shares = [rows(rank, world) for rank in range(world)]
    assert np.array_equal(np.concatenate(shares), rows(0, 1))


@given(
    order=st.sampled_from(["sequential", "shuffled"]),
    stop=st.integers(0, 40),
    sizes=st.lists(st.integers(1, 8), min_size=1, max_size=60),
)
def test_starting_from_a_cursor_equals_never_having_stopped(order: Kind, stop: int, sizes: list[int]) -> None:
    """Also where batches change their size."""
    data, stop = DataConfig(order=order), min(stop, len(sizes) - 1)
    whole = list(batches(COUNTING, data, BATCH, sizes, seed=4))
    cursor = whole[stop - 1][1] if stop else Cursor()
    resumed = list(batches(COUNTING, data, BATCH, sizes[stop:], seed=4, start=cursor))
    for (left, left_cursor), (right, right_cursor) in zip(whole[stop:], resumed, strict=True):
        assert np.array_equal(left.tokens, right.tokens)
        assert np.array_equal(left.targets, right.targets)
        assert left_cursor == right_cursor


@pytest.mark.parametrize("order", ["sequential", "shuffled"])
def test_a_count_of_equal_steps_becomes_the_position_after_them(order: Kind) -> None:
    """Older checkpoints count steps."""
    data = DataConfig(order=order)
    cursors = [cursor for _, cursor in batches(COUNTING, data, BATCH, [8] * 40, seed=4)]
    found = [position_after_steps(COUNTING, data, BATCH, steps) for steps in range(41)]
    assert found == [0, *(cursor.position for cursor in cursors)]


def test_the_seed_moves_a_shuffled_order_only() -> None:
    def first(order: Kind, seed: int) -> np.ndarray:
        return next(batches(COUNTING, DataConfig(order=order), BATCH, [8], seed=seed))[0].tokens

    assert np.array_equal(first("sequential", 1), first("sequential", 2))
    assert not np.array_equal(first("shuffled", 1), first("shuffled", 2))


def test_ranks_that_cannot_share_equally_are_refused() -> None:
    with pytest.raises(ConfigError, match="3 ranks"):
        next(batches(COUNTING, DataConfig(), BATCH, [8], seed=0, rank=0, world=3))


@pytest.mark.parametrize(("order", "steps"), [("sequential", 7 + 5), ("shuffled", (56 + 43) // 8)])
def test_one_pass_refuses_one_step_too_many(order: Kind, steps: int) -> None:
    data = DataConfig(order=order, one_pass=True)
    check_data(COUNTING, data, BATCH, repeat(8), steps)
    with pytest.raises(ConfigError, match=f"--steps {steps + 1} .* one pass gives {steps} steps"):
        check_data(COUNTING, data, BATCH, repeat(8), steps + 1)


def test_one_pass_may_end_with_the_last_sequence() -> None:
    """99 sequences in batches of 9: the last ends where the second pass would begin."""
    data = DataConfig(order="shuffled", one_pass=True)
    check_data(COUNTING, data, BATCH, repeat(9), 11)
    with pytest.raises(ConfigError, match="one pass gives 11 steps"):
        check_data(COUNTING, data, BATCH, repeat(9), 12)


@pytest.mark.parametrize(("order", "steps"), [("sequential", 7 + 5), ("shuffled", (56 + 43) // 8)])
def test_one_pass_counts_what_was_read_before(order: Kind, steps: int) -> None:
    """A resumed run has only the steps that are left; after a rewind it has fewer data than steps."""
    data = DataConfig(order=order, one_pass=True)
    for done in range(1, steps):
        position = position_after_steps(COUNTING, data, BATCH, done)
        check_data(COUNTING, data, BATCH, repeat(8), steps - done, position)
        with pytest.raises(ConfigError, match=f"one pass gives {steps - done} steps"):
            check_data(COUNTING, data, BATCH, repeat(8), steps - done + 1, position)


@pytest.mark.parametrize("order", ["sequential", "shuffled"])
def test_within_one_pass_no_token_is_read_twice(order: Kind) -> None:
    steps = 12
    data = DataConfig(order=order, one_pass=True)
    check_data(COUNTING, data, BATCH, repeat(8), steps)
    inputs = np.concatenate([batch.tokens.ravel() for batch in first_batches(COUNTING, data, BATCH, steps)])
    assert len(np.unique(inputs)) == len(inputs)


def test_a_size_of_any_step_that_no_shard_can_give_is_refused_at_the_start() -> None:
    check_data(COUNTING, DataConfig(), BATCH, [8, 56], 2)
    check_data(COUNTING, DataConfig(), BATCH, [8, 57], 1)
    with pytest.raises(ConfigError, match=r"--batch.tokens 912: no shard holds a whole batch"):
        check_data(COUNTING, DataConfig(), BATCH, [8, 57], 2)


@pytest.mark.parametrize("order", ["sequential", "shuffled"])
def test_more_than_two_passes_are_told_with_the_steps_of_one(order: Kind) -> None:
    def warning(steps: int, data: DataConfig) -> str | None:
        return check_data(COUNTING, data, BATCH, repeat(8), steps)

    data = DataConfig(dir="books", order=order)
    assert warning(24, data) is None
    assert warning(109, data) == "the training text is read 9.1 times; --steps 12 is one pass"
    assert warning(12, replace(data, one_pass=True)) is None
    assert warning(25, data) is not None
    assert warning(109, DataConfig(order=order)) is None  # the built-in text


def test_the_padding_of_aligned_documents_makes_a_pass_longer() -> None:
    corpus, batch = in_memory(documents([130] * 20)), BatchConfig(tokens=256, sequence_tokens=128)
    plain, aligned = (DataConfig(dir="books", end_of_text=EOT, align_documents=align) for align in (False, True))
    warning = "the training text is read 3.0 times; --steps 10 is one pass"
    assert check_data(corpus, plain, batch, repeat(2), 30) == warning
    assert check_data(corpus, aligned, batch, repeat(2), 30) is None


def aligned_batches(corpus: Corpus, batch: BatchConfig, count: int, order: Kind = "sequential") -> list[Batch]:
    return first_batches(corpus, DataConfig(order=order, align_documents=True, end_of_text=EOT), batch, count)


@pytest.mark.parametrize("order", ["sequential", "shuffled"])
def test_aligned_documents_start_at_multiples_of_128(order: Kind) -> None:
    corpus = in_memory(documents([300, 5, 700, 129, 128, 127, 1] * 6), documents([90] * 60))
    batch = BatchConfig(tokens=1024, sequence_tokens=512)
    for found in aligned_batches(corpus, batch, 8, order):
        counted = found.targets != -100
        openings = np.argwhere((found.tokens == EOT) & counted)
        assert len(openings)
        assert np.all(openings[:, 1] % BLOCK_TOKENS == 0)
        assert np.all(found.tokens[~counted] == EOT)  # gaps


def test_an_aligned_batch_equals_a_hand_computation() -> None:
    """Documents of 130, 128 and 3 tokens: gaps of 126, 0 and 125; a document's last token predicts end-of-text."""
    corpus = in_memory(documents([130, 128, 3, 4000]))
    found = aligned_batches(corpus, BatchConfig(tokens=640, sequence_tokens=640), 1)[0]
    gap = np.full(126, -100)
    tokens = [*range(130), *np.full(126, EOT), *range(128), *range(3), *np.full(125, EOT), *range(128)]
    targets = [*range(1, 130), EOT, *gap, *range(1, 128), EOT, 1, 2, EOT, *gap[:125], *range(1, 129)]
    assert found.tokens[0].tolist() == tokens
    assert found.targets[0].tolist() == targets


def test_alignment_loses_no_token_of_an_epoch() -> None:
    """Each document's tokens, in order, are all there; only the last token of a shard has no target."""
    lengths = [300, 5, 700, 129, 128, 7, 1]
    corpus = in_memory(documents([*lengths, 250]))
    whole = AlignedView(corpus)
    assert whole.counted_inputs == documents([*lengths, 250])[:-1].tolist()


class AlignedView:
    """All inputs with a target, read as one window over the whole padded shard."""

    def __init__(self, corpus: Corpus) -> None:
        from paceline.data.aligned import AlignedCorpus

        aligned = AlignedCorpus(corpus.shards, end_of_text=EOT)
        batch = aligned.take(np.array([[0, 0]]), aligned.lengths[0])
        self.counted_inputs = batch.tokens[0][batch.targets[0] != -100].tolist()


def test_a_shard_that_begins_inside_a_document_keeps_that_text() -> None:
    tokens = np.concatenate([np.arange(50, 80), documents([200])]).astype(np.uint16)
    assert AlignedView(in_memory(tokens)).counted_inputs == tokens[:-1].tolist()


def test_aligned_sequences_must_be_multiples_of_128() -> None:
    with pytest.raises(ConfigError, match=r"--batch.sequence-tokens 100.*use 128"):
        aligned_batches(COUNTING, BatchConfig(tokens=400, sequence_tokens=100), 1)


def test_validation_reads_the_first_tokens_in_whole_sequences() -> None:
    found = list(validation_batches(COUNTING, sequence_tokens=100, tokens=550, micro_sequences=2))
    assert [batch.tokens.shape for batch in found] == [(2, 100), (2, 100), (1, 100)]
    rows = np.concatenate([batch.tokens for batch in found])
    assert np.array_equal(rows.ravel(), np.arange(500))
    assert np.array_equal(np.concatenate([batch.targets for batch in found]), rows + 1)


def test_validation_of_zero_tokens_means_all_shards() -> None:
    rows = np.concatenate([batch.tokens for batch in validation_batches(COUNTING, 100, 0, 4)])
    assert rows[:, 0].tolist() == [*range(0, 800, 100), *range(1000, 1600, 100)]  # 899 // 100 and 699 // 100


def test_the_records_validation_is_160_sequences() -> None:
    val = in_memory(np.broadcast_to(np.uint16(7), (10_616_832,)))
    shapes = [batch.tokens.shape for batch in validation_batches(val, 65_536, 10_485_760, 8)]
    assert shapes == [(8, 65_536)] * 20


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_ranks_share_the_validation_without_loss(world: int) -> None:
    shares = [list(validation_batches(COUNTING, 100, 0, 4, rank=rank, world=world)) for rank in range(world)]
    rows = np.concatenate([batch.tokens for share in shares for batch in share])
    assert np.array_equal(rows, np.concatenate([batch.tokens for batch in validation_batches(COUNTING, 100, 0, 4)]))


@pytest.mark.parametrize("tokens", [99, 1500])
def test_validation_that_the_shards_cannot_give_is_refused(tokens: int) -> None:
    with pytest.raises(ConfigError, match=f"--evaluate.tokens {tokens:,}.*1,400 tokens"):
        next(validation_batches(COUNTING, 100, tokens, 4))


def test_a_folder_opens_in_name_order(tmp_path: Path) -> None:
    written = counting_corpus(tmp_path, (50, 60, 70))
    corpus = open_corpus(tmp_path, "*train*.bin", 3000)
    assert corpus.lengths == (50, 60, 70)
    assert sum(corpus.lengths) == 180
    assert corpus.fingerprint == written.fingerprint


def test_folders_without_shards_are_refused(tmp_path: Path) -> None:
    counting_corpus(tmp_path, (50,))
    with pytest.raises(DataError, match=r"no shard matches '\*val\*.bin' \(1 other"):
        open_corpus(tmp_path, "*val*.bin", 3000)
    with pytest.raises(DataError, match="not a folder"):
        open_corpus(tmp_path / "none", "*.bin", 3000)


def test_a_vocabulary_too_small_is_refused_on_opening(tmp_path: Path) -> None:
    counting_corpus(tmp_path, (50, 60))
    with pytest.raises(DataError, match=r"count_train_000002.bin: token 0 has id 1000"):
        open_corpus(tmp_path, "*.bin", 1000)


@pytest.mark.parametrize("with_manifests", [True, False])
def test_the_fingerprint_follows_the_content(tmp_path: Path, with_manifests: bool) -> None:
    def fingerprint(first: int) -> str:
        path = tmp_path / "x_train_000001.bin"
        write_shard(path, counting_tokens(0, 5000) + np.uint16(first), documents=0, tokenizer="")
        if not with_manifests:
            manifest_path(path).unlink()
        return open_corpus(tmp_path, "*.bin", 65_535).fingerprint

    assert fingerprint(0) == fingerprint(0)
    assert fingerprint(0) != fingerprint(1)


@pytest.mark.parametrize("aligned", [False, True])
def test_an_id_past_the_vocabulary_is_found_as_it_is_read_if_the_manifest_lied(aligned: bool, tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    write_shard(path, np.array([0, *range(1, 200), 999, *range(1, 200)], np.uint16), documents=1, tokenizer="t")
    manifest = manifest_path(path)
    manifest.write_text(manifest.read_text().replace('"max_token": 999', '"max_token": 199'))
    corpus = open_corpus(tmp_path, "*.bin", 200)
    data = DataConfig(align_documents=aligned, end_of_text=EOT)
    batch = BatchConfig(tokens=128, sequence_tokens=128)
    read = batches(corpus, data, batch, [1, 1], seed=0)
    next(read)
    with pytest.raises(
        DataError, match=r"x\.bin: among the tokens from 128 on is id 999, not below the vocabulary of 200"
    ):
        next(read)
