"""Small data for the tests: shards whose token at place i tells i, and a few texts."""

from pathlib import Path

import numpy as np

from paceline.data.corpus import Corpus
from paceline.data.shards import Shard, open_shard
from paceline.settings.data import BatchConfig
from paceline.text.shard_writer import write_shard

BATCH = BatchConfig(tokens=8 * 16, sequence_tokens=16)


def counting_corpus(folder: Path, lengths: tuple[int, ...]) -> Corpus:
    """Shards in which shard s holds 1000 s, 1000 s + 1, …, so that a token says where it came from."""
    shards = []
    for number, length in enumerate(lengths):
        path = folder / f"count_train_{number + 1:06d}.bin"
        write_shard(path, counting_tokens(number, length), documents=0, tokenizer="none")
        shards.append(open_shard(path))
    return Corpus(shards=tuple(shards))


def counting_tokens(shard: int, length: int) -> np.ndarray:
    return (1000 * shard + np.arange(length)).astype(np.uint16)


def in_memory(*shards: np.ndarray) -> Corpus:
    return Corpus(shards=tuple(Shard(Path(f"{n}.bin"), tokens, None) for n, tokens in enumerate(shards)))


COUNTING = in_memory(counting_tokens(0, 900), counting_tokens(1, 700))


SAMPLE_TEXTS = [
    "",
    "plain words, and more of them",
    "it's  two spaces\n\n\tand a tab \r\n",
    "<|endoftext|> is text like any other <|endoftext|>",
    "naïve café — Ελληνικά 日本語 🙂🏽 \u200d\ufeff",
    " \u00a0\u2003 odd spaces \x1c\x1f\x85",
    "\x00\x01 control",
]
