"""Validation loss: the mean over all tokens of the first whole sequences, and what gzip makes of the same text.

Ranks take a share each and add up; the result is that of one process up to the order of a sum in fp64.
"""

import gzip
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.core.errors import ConfigError
from paceline.core.units import BLOCK_TOKENS, IGNORE_TARGET
from paceline.data.corpus import Batch, Corpus
from paceline.model.loss import Losses
from paceline.model.masks import MaskRule, block_lists, document_ids, full_block_share
from paceline.parallel.ranks import SINGLE_PROCESS, Ranks
from paceline.settings.model import ModelConfig
from paceline.text.tokenizer import Tokenizer

CPU = torch.device("cpu")
TEXT_BYTES = 1_000_000
"""No batch is read after so much text: more would change little, since gzip looks back 32 KiB only."""


@dataclass(frozen=True, kw_only=True)
class Validation:
    loss: float
    """Mean over tokens, in nats."""
    bits_per_byte: float | None
    """Total loss in bits over the bytes of the text predicted; end-of-text has none. None without a tokenizer."""
    tokens: int


@torch.no_grad()
def validate(
    forward: Callable[[Tensor, Tensor, Tensor], Losses],
    batches: Iterable[Batch],
    windows: Tensor,
    token_bytes: np.ndarray | None,
    ranks: Ranks = SINGLE_PROCESS,
    *,
    device: torch.device = CPU,
    give_up: Callable[[], bool] = lambda: False,
) -> Validation | None:
    """`batches` are this rank's, as many as any other's, if need be by empty ones; `token_bytes` the length in bytes of
    each token id. Sums are kept in fp64 on the device, which is the model's; one wait at the end. None: `give_up`,
    which is asked before each batch and answers the same to all ranks, said so."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    tokens, text_bytes = 0, 0.0 if token_bytes is not None else math.nan  # nan: unknown on one rank is unknown
    for batch in batches:
        if give_up():
            return None
        if not batch.targets.size:
            continue
        inputs = torch.from_numpy(batch.tokens).to(device)
        targets = torch.from_numpy(batch.targets).to(device)
        total += forward(inputs, targets, windows).main.sum(dtype=torch.float64)
        counted = batch.targets[batch.targets != IGNORE_TARGET]
        tokens += counted.size
        text_bytes += 0 if token_bytes is None else int(token_bytes[counted].sum())
    counts = torch.tensor([tokens, text_bytes], dtype=torch.float64, device=device)
    nats, all_tokens, all_bytes = ranks.sum_(torch.cat([total[None], counts])).tolist()
    bits = nats / math.log(2) / all_bytes if all_bytes > 0 else None
    return Validation(loss=nats / all_tokens, bits_per_byte=bits, tokens=int(all_tokens))


def block_share(model: ModelConfig, tokens_BT: Tensor, window: Tensor, *, end_of_text: int) -> Tensor | None:
    """Share of the visited blocks of 128 x 128 that need no element test; None without a mask, or for sequences that
    are not whole blocks."""
    rule, tokens = MaskRule.of(model), tokens_BT.size(1)
    if rule.only_causal or tokens % BLOCK_TOKENS:
        return None
    documents = document_ids(tokens_BT, end_of_text) if rule.by_document else None
    return full_block_share(block_lists(rule, documents, tokens, window))


def validation_batches(
    corpus: Corpus, sequence_tokens: int, tokens: int, micro_sequences: int, *, rank: int = 0, world: int = 1
) -> Iterator[Batch]:
    """The first `tokens` tokens in whole sequences (0: all), at most `micro_sequences` at a time; this rank's share, in
    as many batches as the largest share takes, the last of which may be empty."""
    spans = validation_spans(corpus, sequence_tokens, tokens)
    share = spans[rank * len(spans) // world : (rank + 1) * len(spans) // world]
    for first in range(0, -(-len(spans) // world), micro_sequences):
        yield corpus.take(share[first : first + micro_sequences], sequence_tokens)


def padding_batch(sequence_tokens: int) -> Batch:
    """One sequence in which no target counts, for a rank that must make a pass and has nothing left to validate."""
    tokens = np.zeros((1, sequence_tokens), dtype=np.int32)
    return Batch(tokens, np.full(tokens.shape, IGNORE_TARGET, dtype=np.int64))


def validation_spans(corpus: Corpus, sequence_tokens: int, tokens: int) -> np.ndarray:
    """(S, 2) rows of (shard, first token): whole sequences from each shard's start, S = tokens // sequence_tokens."""
    starts = [np.arange((length - 1) // sequence_tokens) * sequence_tokens for length in corpus.lengths]
    rows = [np.stack([np.full(len(start), shard), start], axis=1) for shard, start in enumerate(starts)]
    spans = np.concatenate(rows)
    wanted = tokens // sequence_tokens if tokens else len(spans)
    if not 0 < wanted <= len(spans):
        there = f"{len(spans) * sequence_tokens:,} tokens in whole sequences of {sequence_tokens:,}"
        cure = "use 1 to that many sequences, or 0 for all where there are any"
        raise ConfigError(f"--evaluate.tokens {tokens:,}: the validation shards hold {there}; {cure}")
    return spans[:wanted]


def gzip_bits_per_byte(batches: Iterable[Batch], tokenizer: Tokenizer) -> float | None:
    """Bits that `gzip -9` needs for a byte of the text that these batches ask for. None: they ask for none."""
    text = bytearray()
    for batch in batches:
        text += tokenizer.decode_bytes(batch.targets[batch.targets != IGNORE_TARGET].tolist())
        if len(text) >= TEXT_BYTES:
            break
    return 8 * len(gzip.compress(text, 9)) / len(text) if text else None
