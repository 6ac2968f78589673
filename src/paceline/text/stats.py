"""How many documents and tokens there are, and how long documents are, per shard and in all.

A document is counted in the shard where it begins, with its whole length (end-of-text included), also where it runs on
into the next shard of its side. One scan at 2 GB/s.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np

from paceline.core.errors import DataError
from paceline.data.shards import Shard, open_shard, positions_of
from paceline.text.tokenizer import END_OF_TEXTS, carried_identity


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Documents of `at_least` tokens up to twice as many, exclusive."""

    at_least: int
    documents: int


@dataclass(frozen=True, kw_only=True)
class ShardStats:
    file: str
    tokens: int
    documents: int
    lengths: tuple[Bucket, ...]


@dataclass(frozen=True, kw_only=True)
class Stats:
    end_of_text: int
    shards: tuple[ShardStats, ...]
    total: ShardStats


def stats(path: Path, end_of_text: int | None = None) -> Stats:
    """Of one shard, or of all shards in a folder. `end_of_text` None: as the tokenizer beside the shards says."""
    folder, paths = (path.parent, [path]) if path.is_file() else (path, sorted(path.glob("*.bin")))
    if not paths:
        raise DataError(f"{path}: no shards there; name a .bin file or the folder that holds them")
    carried = carried_identity(folder) if end_of_text is None else None
    known = END_OF_TEXTS["gpt2"] if carried is None else carried.end_of_text  # without a tokenizer: llm.c's shards
    token = known if end_of_text is None else end_of_text
    shards = sorted(map(open_shard, paths), key=_series)
    lengths = [found for _, side in groupby(shards, _series) for found in document_lengths(list(side), token)]
    each = tuple(_summary(s.path.name, len(s), found) for s, found in zip(shards, lengths, strict=True))
    total = _summary("all", sum(map(len, shards)), np.concatenate(lengths))
    return Stats(end_of_text=token, shards=each, total=total)


def _series(shard: Shard) -> str:
    """Shards whose names differ only in their number belong together: text runs on from one to the next."""
    return shard.path.stem.rstrip("0123456789")


def document_lengths(shards: Sequence[Shard], end_of_text: int) -> list[np.ndarray]:
    """For each shard the tokens of every document that begins in it, from the first end-of-text of all on."""
    starts = [positions_of(shard, end_of_text) for shard in shards]
    offsets = np.cumsum([0, *map(len, shards)])
    everywhere = np.concatenate([found + offset for found, offset in zip(starts, offsets[:-1], strict=True)])
    lengths = np.diff(everywhere, append=offsets[-1])
    return np.split(lengths, np.cumsum([len(found) for found in starts])[:-1])


def _summary(file: str, tokens: int, lengths: np.ndarray) -> ShardStats:
    return ShardStats(file=file, tokens=tokens, documents=len(lengths), lengths=tuple(histogram(lengths)))


def histogram(lengths: np.ndarray) -> list[Bucket]:
    """Power-of-two buckets from the shortest document to the longest, empty ones between included."""
    if len(lengths) == 0:
        return []
    exponents = np.frexp(lengths.astype(np.float64))[1] - 1  # floor of log2, exact
    counts = np.bincount(exponents)
    return [Bucket(at_least=2**k, documents=int(counts[k])) for k in range(int(exponents.min()), len(counts))]
