"""Which tokens a step reads: a function of (seed, step) alone, the same for any number of ranks.

An order turns a step into windows, an (S, 2) int64 array of (shard, first token), computed directly: nothing is
replayed on resume. `sequential` is record 18's rule: one common base, and before reading, if base + G + 1 >= length,
the next shard from its start. `shuffled` takes every window of an epoch once, from a grid moved by a random offset;
a batch may straddle two epochs, so no window is dropped. An epoch's first batch costs a sort of its windows (1.6 s
for ten million), the others nothing. The random numbers are Philox's raw output, whose stream numpy promises to keep;
`Generator.permutation` promises nothing across versions.
"""

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Protocol

import numpy as np

from paceline.core.errors import ConfigError
from paceline.data.config import BatchConfig, DataConfig
from paceline.data.corpus import Source

SHUFFLE_PURPOSE = 1
"""Keeps the shuffle's random stream apart from others that are keyed by the same seed."""


class Order(Protocol):
    @property
    def sequence_tokens(self) -> int: ...

    @property
    def steps_per_pass(self) -> int:
        """Steps in which no token is read twice."""

    def windows(self, step: int) -> np.ndarray:
        """The global batch of `step`: (S, 2) int64 rows of (shard, first token)."""


@dataclass(frozen=True)
class SequentialOrder:
    """File order. A shard gives as many batches as record 18's rule takes from it, (length - 2) // G; one that is too
    short for a batch is passed over."""

    lengths: tuple[int, ...]
    sequences: int
    sequence_tokens: int

    def __post_init__(self) -> None:
        if self.steps_per_pass == 0:
            raise ConfigError(
                f"--batch.tokens {self._batch_tokens:,}: no shard holds a whole batch and its last target (the longest "
                f"has {max(self.lengths):,} tokens); lower --batch.tokens or make longer shards"
            )

    @property
    def _batch_tokens(self) -> int:
        return self.sequences * self.sequence_tokens

    @cached_property
    def _steps_through(self) -> list[int]:
        """Steps of one pass after which each shard is done."""
        return list(accumulate(max(0, (length - 2) // self._batch_tokens) for length in self.lengths))

    @property
    def steps_per_pass(self) -> int:
        return self._steps_through[-1]

    def windows(self, step: int) -> np.ndarray:
        step %= self.steps_per_pass
        shard = bisect_right(self._steps_through, step)
        before = self._steps_through[shard - 1] if shard else 0
        starts = (step - before) * self._batch_tokens + np.arange(self.sequences) * self.sequence_tokens
        return np.stack([np.full(self.sequences, shard), starts], axis=1)


@dataclass(frozen=True)
class ShuffledOrder:
    """Every window of an epoch once, in an order drawn from (seed, epoch)."""

    lengths: tuple[int, ...]
    sequences: int
    sequence_tokens: int
    seed: int
    grain: int = 1
    """Windows start at multiples of this."""

    def __post_init__(self) -> None:
        if self.steps_per_pass == 0:
            raise ConfigError(
                f"--batch.tokens {self.sequences * self.sequence_tokens:,} takes {self.sequences:,} sequences, but the "
                f"shards hold only {self.windows_per_epoch:,} of {self.sequence_tokens:,} tokens; lower --batch.tokens"
            )

    @cached_property
    def _windows_through(self) -> np.ndarray:
        """Windows of an epoch in each shard and those before it; the last token of a shard is only a target."""
        return np.cumsum([max(0, (length - 1) // self.sequence_tokens) for length in self.lengths])

    @property
    def windows_per_epoch(self) -> int:
        return int(self._windows_through[-1])

    @property
    def steps_per_pass(self) -> int:
        return self.windows_per_epoch // self.sequences

    def windows(self, step: int) -> np.ndarray:
        numbers = np.arange(step * self.sequences, (step + 1) * self.sequences)
        epochs, turns = np.divmod(numbers, self.windows_per_epoch)
        parts = [self._windows_of(int(epoch), turns[epochs == epoch]) for epoch in np.unique(epochs)]
        return np.concatenate(parts)

    def _windows_of(self, epoch: int, turns: np.ndarray) -> np.ndarray:
        offsets, permutation = _draw_epoch(self, epoch)
        numbers = permutation[turns]
        shards = np.searchsorted(self._windows_through, numbers, side="right")
        before = np.concatenate([[0], self._windows_through])[shards]
        return np.stack([shards, offsets[shards] + (numbers - before) * self.sequence_tokens], axis=1)


@lru_cache(maxsize=2)  # two, because a batch may straddle two epochs
def _draw_epoch(order: ShuffledOrder, epoch: int) -> tuple[np.ndarray, np.ndarray]:
    """The grid's offset in each shard, and the order of the epoch's windows."""
    random = np.random.Philox(np.random.SeedSequence((order.seed, SHUFFLE_PURPOSE, epoch)))
    slack = np.array([max(0, length - 1) % order.sequence_tokens // order.grain + 1 for length in order.lengths])
    offsets = (random.random_raw(len(order.lengths)) % slack.astype(np.uint64)).astype(np.int64) * order.grain
    return offsets, np.argsort(random.random_raw(order.windows_per_epoch), kind="stable")


def make_order(source: Source, data: DataConfig, batch: BatchConfig, seed: int) -> Order:
    """The order that the config asks for, over what `source` holds."""
    if batch.sequence_tokens % source.grain:
        raise ConfigError(
            f"--batch.sequence-tokens {batch.sequence_tokens:,} is not a multiple of {source.grain}, to which "
            f"--data.align-documents aligns; use {max(1, batch.sequence_tokens // source.grain) * source.grain:,}"
        )
    if data.order == "sequential":
        return SequentialOrder(source.lengths, batch.sequences, batch.sequence_tokens)
    return ShuffledOrder(source.lengths, batch.sequences, batch.sequence_tokens, seed, source.grain)
