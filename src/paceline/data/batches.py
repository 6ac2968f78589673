"""Batches for one rank, each with the position from which the next one begins.

The position is a value, `Cursor(position)`: print it, save it, compare it; starting from it equals never having
stopped. A rank takes a contiguous share of the global batch's sequences, as record 18 slices it.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, islice

import numpy as np

from paceline.core.errors import ConfigError
from paceline.data.corpus import Batch, Corpus
from paceline.data.order import make_order
from paceline.settings.data import BUILTIN, BatchConfig, DataConfig


@dataclass(frozen=True)
class Cursor:
    """Where in the data a run stands."""

    position: int | None = 0
    """Tokens of the stream that are read or passed; None: written by a version that counted steps ..."""
    step: int | None = None  # ... of one size, so many


FROM_THE_START = Cursor()
MANY_PASSES = 2  # a run that reads its text more often than this prints a warning: it may learn the text by heart


def batches(
    corpus: Corpus,
    data: DataConfig,
    batch: BatchConfig,
    sizes: Iterable[int],
    *,
    seed: int,
    start: Cursor = FROM_THE_START,
    rank: int = 0,
    world: int = 1,
) -> Iterator[tuple[Batch, Cursor]]:
    """This rank's share of the batches from `start` on, of so many sequences each, and the cursor after each."""
    source = training_source(corpus, data)
    order, position = make_order(source, data, batch, seed), start.position
    assert position is not None
    for sequences in sizes:
        spans, position = order.spans(position, sequences)
        yield source.take(share_of(spans, rank, world), order.sequence_tokens), Cursor(position)


def check_data(
    corpus: Corpus, data: DataConfig, batch: BatchConfig, sizes: Iterable[int], steps: int, start: int = 0
) -> str | None:
    """Raise ConfigError if the corpus cannot give the run its batches, or only by reading a token twice where
    `data.one_pass` forbids that. Returns a warning about a run that reads a text, not the built-in one, often."""
    order = make_order(training_source(corpus, data), data, batch, seed=0)
    run = list(islice(sizes, steps))
    for sequences in sorted(set(run)):
        order.check(sequences)
    after_steps = islice(accumulate(run, order.after, initial=start), 1, None)
    one_pass = sum(after <= order.pass_tokens for after in after_steps)
    if data.one_pass and one_pass < len(run):
        twice = f"--steps {steps:,} would read data twice, which --data.one-pass forbids"
        cure = "use at most that many, more data, or --data.no-one-pass"
        raise ConfigError(f"{twice}: one pass gives {one_pass:,} steps; {cure}")
    if data.dir == BUILTIN or len(run) <= MANY_PASSES * one_pass:
        return None
    return f"the training text is read {len(run) / max(1, one_pass):,.1f} times; --steps {one_pass} is one pass"


def position_after_steps(corpus: Corpus, data: DataConfig, batch: BatchConfig, steps: int) -> int:
    """Where a run of equal batches stands after so many of them, as older versions counted."""
    order = make_order(training_source(corpus, data), data, batch, seed=0)
    return list(accumulate([batch.sequences] * steps, order.after, initial=0))[-1]


def spans_at(
    corpus: Corpus, data: DataConfig, batch: BatchConfig, cursor: Cursor, sequences: int, *, seed: int
) -> np.ndarray:
    """Where the global batch that begins at a cursor lies: (S, 2) rows of (shard, first token)."""
    assert cursor.position is not None
    return make_order(training_source(corpus, data), data, batch, seed).spans(cursor.position, sequences)[0]


def training_source(corpus: Corpus, data: DataConfig) -> Corpus:
    """What training sequences are cut from: the corpus, or its aligned view. Validation always reads the corpus."""
    if not data.align_documents:
        return corpus
    from paceline.data.aligned import AlignedCorpus

    return AlignedCorpus(corpus.shards, corpus.vocab_size, data.end_of_text)


def share_of(spans: np.ndarray, rank: int, world: int) -> np.ndarray:
    """Rows of the global batch that `rank` of `world` computes; the shares in rank order are the whole."""
    if len(spans) % world:
        unequal = f"{len(spans)} sequences a step cannot be shared equally by {world} ranks"
        raise ConfigError(f"--batch.tokens: {unequal}; use a multiple of {world} sequences")
    size = len(spans) // world
    return spans[rank * size : (rank + 1) * size]
