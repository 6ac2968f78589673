"""Shards in reading order as one value, and the cutting of windows out of them.

A corpus knows nothing of steps or ranks: `order.py` says which windows, `take` cuts them. Its fingerprint goes on the
run card; with manifests it is made of their hashes, without them of names, sizes and 16 samples of 4 KiB a shard, so
that opening never reads the data (10 ms for a hundred shards).
"""

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from paceline.core.errors import DataError
from paceline.data.shards import HEADER_BYTES, Shard

SAMPLES_PER_SHARD = 16
SAMPLE_TOKENS = 2048


@dataclass(frozen=True, eq=False)
class Batch:
    """S sequences of T tokens: `tokens` (S, T) int32, `targets` (S, T) int64, each the token that follows."""

    tokens: np.ndarray
    targets: np.ndarray


@dataclass(frozen=True, eq=False)
class Corpus:
    shards: tuple[Shard, ...]
    vocab_size: int | None = None  # ids must be below; None: not checked

    grain = 1  # windows start at multiples of it

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(len(shard) for shard in self.shards)

    @cached_property
    def fingerprint(self) -> str:
        """Changes when a shard, or the order of shards, does. See the module head for how sure that is."""
        hashes = "".join(map(_content_hash, self.shards))
        return hashlib.blake2b(hashes.encode(), digest_size=16).hexdigest()

    def take(self, windows: np.ndarray, sequence_tokens: int) -> Batch:
        """Cut `windows`, (S, 2) rows of (shard, first token), to `sequence_tokens` tokens and one more as target."""
        rows = np.empty((len(windows), sequence_tokens + 1), dtype=np.uint16)
        for row, (shard, start) in zip(rows, windows.tolist(), strict=True):
            row[:] = self.shards[shard].tokens[start : start + sequence_tokens + 1]
        self.check_ids(rows, windows)
        return Batch(tokens=rows[:, :-1].astype(np.int32), targets=rows[:, 1:].astype(np.int64))

    def check_ids(self, rows: np.ndarray, windows: np.ndarray) -> None:
        """Raise DataError if a row holds an id past the vocabulary: a manifest may have lied, or the file changed since
        it was opened. 30 µs for 524,288 tokens; an id that got through would end the process on a GPU."""
        if self.vocab_size is not None and int(rows.max(initial=0)) >= self.vocab_size:
            row = int(np.argmax(rows.max(axis=1) >= self.vocab_size))
            shard, start = windows[row].tolist()
            raise DataError(
                f"{self.shards[shard].path}: among the tokens from {start:,} on is id {int(rows[row].max())}, not "
                f"below the vocabulary of {self.vocab_size:,}; `paceline verify` says whether the file is damaged"
            )


def _content_hash(shard: Shard) -> str:
    if shard.manifest is not None:
        return shard.manifest.blake2b
    digest = hashlib.blake2b(f"{shard.path.name} {HEADER_BYTES + 2 * len(shard)}".encode(), digest_size=16)
    for start in np.linspace(0, max(0, len(shard) - SAMPLE_TOKENS), SAMPLES_PER_SHARD).astype(np.int64):
        digest.update(np.ascontiguousarray(shard.tokens[start : start + SAMPLE_TOKENS]).data)
    return digest.hexdigest()
