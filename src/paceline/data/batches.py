"""Batches for one rank, each with the position from which the next one begins.

The position is a value, `Cursor(step)`: print it, save it, compare it; starting from it equals never having stopped.
A rank takes a contiguous share of the global batch's sequences, as record 18 slices it. Validation reads the first
tokens of its shards in whole sequences, the same for every call.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from paceline.core.errors import ConfigError
from paceline.data.aligned import AlignedCorpus
from paceline.data.config import BUILTIN, BatchConfig, DataConfig
from paceline.data.corpus import IGNORED_TARGET, Batch, Corpus, Source, open_corpus
from paceline.data.order import Order, make_order

__all__ = ["Batch", "Corpus", "Cursor", "batches", "check_one_pass", "open_corpus", "validation_batches"]


@dataclass(frozen=True)
class Cursor:
    """Where in the data a run stands: the step whose batch comes next."""

    step: int = 0


FROM_THE_START = Cursor()
MANY_PASSES = 2
"""A run that reads its text more often than this says so: it may learn the text by heart."""


def batches(
    corpus: Corpus,
    data: DataConfig,
    batch: BatchConfig,
    *,
    seed: int,
    start: Cursor = FROM_THE_START,
    rank: int = 0,
    world: int = 1,
) -> Iterator[tuple[Batch, Cursor]]:
    """This rank's share of batch `start.step` and all that follow, each with the cursor after it."""
    source = training_source(corpus, data)
    return read(source, make_order(source, data, batch, seed), start, rank=rank, world=world)


def check_one_pass(corpus: Corpus, data: DataConfig, batch: BatchConfig, steps: int) -> None:
    """Refuse a run that would read a token twice (`data.one_pass`)."""
    limit = _steps_per_pass(corpus, data, batch)
    if steps > limit:
        raise ConfigError(
            f"--steps {steps:,} would read data twice, which --data.one-pass forbids: one pass gives {limit:,} steps "
            f"of {batch.tokens:,} tokens; use at most that many, more data, or --data.no-one-pass"
        )


def told_of_passes(corpus: Corpus, data: DataConfig, batch: BatchConfig, steps: int) -> str | None:
    """What to say of a run that reads its text more than twice; None of others, and of the built-in text, which is
    small by choice."""
    if data.dir == BUILTIN or steps * batch.tokens <= corpus.total_tokens:
        return None  # aligned documents would cost a scan of all shards, which is little where the text is read twice
    one_pass = _steps_per_pass(corpus, data, batch)
    if steps <= MANY_PASSES * one_pass:
        return None
    return f"the training text is read {steps / one_pass:,.1f} times; --steps {one_pass} is one pass"


def _steps_per_pass(corpus: Corpus, data: DataConfig, batch: BatchConfig) -> int:
    return make_order(training_source(corpus, data), data, batch, seed=0).steps_per_pass


def windows_at(corpus: Corpus, data: DataConfig, batch: BatchConfig, step: int, *, seed: int) -> np.ndarray:
    """Where the global batch of a step lies: (S, 2) rows of (shard, first token)."""
    return make_order(training_source(corpus, data), data, batch, seed).windows(step)


def training_source(corpus: Corpus, data: DataConfig) -> Source:
    """What training windows are cut from: the corpus, or its aligned view. Validation always reads the corpus."""
    return AlignedCorpus(corpus, data.end_of_text) if data.align_documents else corpus


def read(source: Source, order: Order, start: Cursor, *, rank: int, world: int) -> Iterator[tuple[Batch, Cursor]]:
    for step in itertools.count(start.step):
        share = share_of(order.windows(step), rank, world)
        yield source.take(share, order.sequence_tokens), Cursor(step=step + 1)


def share_of(windows: np.ndarray, rank: int, world: int) -> np.ndarray:
    """Rows of the global batch that `rank` of `world` computes; the shares in rank order are the whole."""
    if len(windows) % world:
        raise ConfigError(
            f"--batch.tokens: {len(windows)} sequences a step cannot be shared equally by {world} ranks; "
            f"use a multiple of {world} sequences"
        )
    size = len(windows) // world
    return windows[rank * size : (rank + 1) * size]


def validation_batches(
    source: Source, sequence_tokens: int, tokens: int, micro_sequences: int, *, rank: int = 0, world: int = 1
) -> Iterator[Batch]:
    """The first `tokens` tokens in whole sequences (0: all), at most `micro_sequences` at a time; this rank's share, in
    as many batches as the largest share takes, the last of which may be empty."""
    windows = validation_windows(source, sequence_tokens, tokens)
    share = windows[rank * len(windows) // world : (rank + 1) * len(windows) // world]
    for first in range(0, -(-len(windows) // world), micro_sequences):
        yield source.take(share[first : first + micro_sequences], sequence_tokens)


def nothing_counted(sequence_tokens: int) -> Batch:
    """A sequence of which no target counts, for who must make a pass and has nothing to look at."""
    tokens = np.zeros((1, sequence_tokens), dtype=np.int32)
    return Batch(tokens, np.full(tokens.shape, IGNORED_TARGET, dtype=np.int64))


def validation_windows(source: Source, sequence_tokens: int, tokens: int) -> np.ndarray:
    """(S, 2) rows of (shard, first token): whole sequences from each shard's start, S = tokens // sequence_tokens."""
    starts = [np.arange((length - 1) // sequence_tokens) * sequence_tokens for length in source.lengths]
    rows = [np.stack([np.full(len(start), shard), start], axis=1) for shard, start in enumerate(starts)]
    windows = np.concatenate(rows)
    wanted = tokens // sequence_tokens if tokens else len(windows)
    if not 0 < wanted <= len(windows):
        raise ConfigError(
            f"--evaluate.tokens {tokens:,}: the validation shards hold {len(windows) * sequence_tokens:,} tokens in "
            f"whole sequences of {sequence_tokens:,}; use 1 to that many sequences, or 0 for all where there are any"
        )
    return windows[:wanted]
