"""What is read, in which order, and how it is cut into batches. No torch."""

import os
import re
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from paceline.core.errors import ConfigError
from paceline.settings.limits import Limited, at_least

BUILTIN = "builtin"
"""`data.dir` value that means the corpus every Python installation carries."""
NAMED_TOGETHER = ("data.tokenizer", "data.end_of_text", "model.vocab_size")
"""What a preset names together, so that the three follow the data together (`text/identity.py`)."""


@dataclass(frozen=True, kw_only=True)
class DataConfig(Limited, prefix="--data."):
    """Where the tokens come from."""

    dir: str = BUILTIN
    """Folder with the shards, or `builtin` for the text that every Python installation carries."""
    train: str = "*train*.bin"
    """Pattern of the training shards inside `dir`; they are read in sorted name order."""
    val: str = "*val*.bin"
    """Pattern of the validation shards inside `dir`."""
    tokenizer: str = "bpe-2048"
    """`gpt2`, `bytes`, `bpe-N` (a byte-level BPE of N tokens trained on the data), or the path of a tokenizer.json or
    of a folder with one. A folder made by `data prepare` carries its own, and that one is used."""
    end_of_text: Annotated[int, at_least(0).saying("token ids start at 0")] = 0
    """Token id that opens each document."""
    order: Literal["sequential", "shuffled"] = "sequential"
    """`sequential`: file order, a shard's tail that does not fill a batch is left out. `shuffled`: every sequence of
    an epoch once, in an order drawn from the seed."""
    align_documents: bool = False
    """Start every document at a multiple of 128 tokens, padding the gap (targets there do not count). Full blocks
    become more frequent; the padding costs tokens."""
    one_pass: bool = False
    """Refuse a run that would read a shard twice (the rule of the en-140M track)."""

    def check(self) -> None:
        size = re.fullmatch(r"bpe-(\d{3,5})", self.tokenizer, re.ASCII)
        named = self.tokenizer in ("gpt2", "bytes") or is_path(self.tokenizer)
        if not (named or (size and 257 <= int(size[1]) <= 65_535)):
            use = "gpt2, bytes, bpe-N with 257 <= N <= 65535, or the path of a tokenizer.json or its folder (./NAME)"
            raise ConfigError(f"--data.tokenizer {self.tokenizer:.60}: use {use}")


def is_path(tokenizer: str) -> bool:
    """Whether a tokenizer is named by where it lies."""
    return any(sign in tokenizer for sign in {"/", os.sep}) or tokenizer.endswith(".json")


@dataclass(frozen=True, kw_only=True)
class BatchConfig(Limited, prefix="--batch."):
    """One optimizer step's tokens. The step is defined by `tokens`; how it is carried out changes nothing."""

    tokens: Annotated[int, at_least(1)]
    """Tokens of one optimizer step, over all ranks and micro-batches."""
    sequence_tokens: Annotated[int, at_least(1)]
    """Tokens of one sequence. Attention and positions never cross its border."""
    micro_tokens: int | None = None
    """Tokens of one forward and backward pass on one rank; a whole number of sequences. None: one sequence, or 65,536
    tokens if a sequence is shorter, and less where memory is short (`parallel/memory_plans.py`)."""

    def check(self) -> None:
        length, micro = self.sequence_tokens, self.micro_tokens
        batch, sequences = f"--batch.tokens {self.tokens:,}", f"--batch.sequence-tokens {length:,}"
        if self.tokens % length:
            fit = max(1, self.tokens // length) * length
            raise ConfigError(f"{batch} is not a multiple of {sequences}; use {fit:,} or sequences of another length")
        if micro is not None and (micro < 1 or micro % length or self.tokens % micro):
            raise ConfigError(f"--batch.micro-tokens {micro:,} must be a multiple of {sequences} and divide {batch}")

    @property
    def sequences(self) -> int:
        return self.tokens // self.sequence_tokens

    def with_tokens(self, tokens: int) -> "BatchConfig":
        """As many sequences as make these tokens; a micro-batch that does not divide them shrinks until it does."""
        micro = self.micro_tokens
        if micro is not None and tokens % micro and tokens % self.sequence_tokens == 0:
            micro = next(n for n in range(min(micro, tokens), 0, -self.sequence_tokens) if tokens % n == 0)
        return replace(self, tokens=tokens, micro_tokens=micro)

    @property
    def micro_sequences(self) -> int:
        """Sequences of one forward pass on one rank: the largest number that divides the batch and fits the limit."""
        if self.micro_tokens is not None:
            return self.micro_tokens // self.sequence_tokens
        limit = max(1, DEFAULT_MICRO_TOKENS // self.sequence_tokens)
        return next(n for n in range(min(limit, self.sequences), 0, -1) if self.sequences % n == 0)


DEFAULT_MICRO_TOKENS = 65_536
"""The records' unit of work for one GPU."""
