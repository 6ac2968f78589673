"""Which tokens a batch reads: a function of seed and position alone, the same for any number of ranks.

A position counts tokens of the stream, so batches may change size. An order turns a position and a number of sequences
into spans, an (S, 2) int64 array of (shard, first token), and the position after them; nothing is replayed on resume.
`sequential` is record 18's rule: before reading G tokens at a base, if base + G + 1 >= length, go to the next shard's
start; what is left of the shard counts as passed. `shuffled` takes every sequence of an epoch once, from a grid moved
by a random offset; a batch may straddle two epochs. An epoch's first batch costs a sort of its sequences (1.6 s for ten
million). The random numbers are Philox's raw output, whose stream numpy promises to keep, unlike `permutation`'s.
"""

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate

import numpy as np

from paceline.core.errors import ConfigError
from paceline.data.corpus import Corpus
from paceline.settings.data import BatchConfig, DataConfig

SHUFFLE_PURPOSE = 1  # keeps the shuffle's random stream apart from others that are keyed by the same seed


@dataclass(frozen=True)
class SequentialOrder:
    """File order. A shard that is too short for a batch is passed over."""

    lengths: tuple[int, ...]
    sequence_tokens: int

    @cached_property
    def _starts(self) -> list[int]:
        """Positions at which the shards begin, and the end of the last."""
        return [0, *accumulate(self.lengths)]

    @property
    def pass_tokens(self) -> int:
        """The position at which the second pass begins."""
        return self._starts[-1]

    def check(self, sequences: int) -> None:
        """Raise ConfigError if no batch of so many sequences can be read."""
        if max(self.lengths) < (tokens := sequences * self.sequence_tokens) + 2:
            none = f"no shard holds a whole batch and its last target (the longest has {max(self.lengths):,} tokens)"
            raise ConfigError(f"--batch.tokens {tokens:,}: {none}; lower --batch.tokens or make longer shards")

    def spans(self, position: int, sequences: int) -> tuple[np.ndarray, int]:
        """The global batch that begins at or after `position`, and the position after it."""
        shard, base, after = self._place(position, sequences)
        firsts = base + np.arange(sequences) * self.sequence_tokens
        return np.stack([np.full(sequences, shard), firsts], axis=1), after

    def after(self, position: int, sequences: int) -> int:
        """The position alone, at once; `accumulate(sizes, order.after, initial=...)` gives those of many batches."""
        return self._place(position, sequences)[2]

    def _place(self, position: int, sequences: int) -> tuple[int, int, int]:
        """Shard and first token of a batch, and the position after it."""
        passes, at = divmod(position, self.pass_tokens)
        tokens, shard = sequences * self.sequence_tokens, bisect_right(self._starts, at) - 1
        base = at - self._starts[shard]
        while base + tokens + 1 >= self.lengths[shard]:
            shard, base = shard + 1, 0
            if shard == len(self.lengths):
                passes, shard = passes + 1, 0
        return shard, base, passes * self.pass_tokens + self._starts[shard] + base + tokens


@dataclass(frozen=True)
class ShuffledOrder:
    """Every sequence of an epoch once, in an order drawn from (seed, epoch)."""

    lengths: tuple[int, ...]
    sequence_tokens: int
    seed: int
    grain: int = 1  # sequences start at multiples of this

    @cached_property
    def _through(self) -> np.ndarray:
        """Sequences of an epoch in each shard and those before it; the last token of a shard is only a target."""
        return np.cumsum([max(0, (length - 1) // self.sequence_tokens) for length in self.lengths])

    @property
    def sequences_per_epoch(self) -> int:
        return int(self._through[-1])

    @property
    def pass_tokens(self) -> int:
        return self.sequences_per_epoch * self.sequence_tokens

    def check(self, sequences: int) -> None:
        if sequences > self.sequences_per_epoch:
            raise ConfigError(
                f"--batch.tokens {sequences * self.sequence_tokens:,} takes {sequences:,} sequences, but the shards "
                f"hold only {self.sequences_per_epoch:,} of {self.sequence_tokens:,} tokens; lower --batch.tokens"
            )

    def spans(self, position: int, sequences: int) -> tuple[np.ndarray, int]:
        first = position // self.sequence_tokens
        epochs, turns = np.divmod(np.arange(first, first + sequences), self.sequences_per_epoch)
        parts = [self._spans_of(int(epoch), turns[epochs == epoch]) for epoch in np.unique(epochs)]
        return np.concatenate(parts), self.after(position, sequences)

    def after(self, position: int, sequences: int) -> int:
        return position + sequences * self.sequence_tokens

    def _spans_of(self, epoch: int, turns: np.ndarray) -> np.ndarray:
        offsets, permutation = _draw_epoch(self, epoch)
        numbers = permutation[turns]
        shards = np.searchsorted(self._through, numbers, side="right")
        before = np.concatenate([[0], self._through])[shards]
        return np.stack([shards, offsets[shards] + (numbers - before) * self.sequence_tokens], axis=1)


@lru_cache(maxsize=2)  # two, because a batch may straddle two epochs
def _draw_epoch(order: ShuffledOrder, epoch: int) -> tuple[np.ndarray, np.ndarray]:
    """The grid's offset in each shard, and the order of the epoch's sequences."""
    random = np.random.Philox(np.random.SeedSequence((order.seed, SHUFFLE_PURPOSE, epoch)))
    slack = np.array([max(0, length - 1) % order.sequence_tokens // order.grain + 1 for length in order.lengths])
    offsets = (random.random_raw(len(order.lengths)) % slack.astype(np.uint64)).astype(np.int64) * order.grain
    return offsets, np.argsort(random.random_raw(order.sequences_per_epoch), kind="stable")


Order = SequentialOrder | ShuffledOrder


def make_order(corpus: Corpus, data: DataConfig, batch: BatchConfig, seed: int) -> Order:
    """The order that the config asks for, over what `corpus` holds."""
    length, grain = batch.sequence_tokens, corpus.grain
    if length % grain:
        aligned = f"{grain}, to which --data.align-documents aligns; use {max(1, length // grain) * grain:,}"
        raise ConfigError(f"--batch.sequence-tokens {length:,} is not a multiple of {aligned}")
    if data.order == "sequential":
        return SequentialOrder(corpus.lengths, length)
    return ShuffledOrder(corpus.lengths, length, seed, grain)
