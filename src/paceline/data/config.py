"""What is read, in which order, and how it is cut into batches. No torch."""

from dataclasses import dataclass
from typing import Literal

from paceline.core.errors import ConfigError

BUILTIN = "builtin"
"""`data.dir` value that means the corpus every Python installation carries."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where the tokens come from."""

    dir: str = BUILTIN
    """Folder with the shards, or `builtin` for the text that every Python installation carries."""
    train: str = "*train*.bin"
    """Pattern of the training shards inside `dir`; they are read in sorted name order."""
    val: str = "*val*.bin"
    """Pattern of the validation shards inside `dir`."""
    tokenizer: str = "bpe-2048"
    """`gpt2`, `bytes`, or `bpe-N`: a byte-level BPE of N tokens trained on the data. A folder made by
    `data prepare` carries its own, and that one is used."""
    end_of_text: int = 0
    """Token id that opens each document."""
    order: Literal["sequential", "shuffled"] = "sequential"
    """`sequential`: file order, a shard's tail that does not fill a batch is left out. `shuffled`: every sequence of
    an epoch once, in an order drawn from the seed."""
    align_documents: bool = False
    """Start every document at a multiple of 128 tokens, padding the gap (targets there do not count). Full blocks
    become more frequent; the padding costs tokens."""
    one_pass: bool = False
    """Refuse a run that would read a shard twice (the rule of the en-140M track)."""

    def __post_init__(self) -> None:
        known = self.tokenizer in ("gpt2", "bytes")
        size = self.tokenizer.removeprefix("bpe-")
        if not known and not (self.tokenizer.startswith("bpe-") and size.isdigit() and 257 <= int(size) <= 65_535):
            raise ConfigError(
                f"--data.tokenizer {self.tokenizer}: not a tokenizer; use gpt2, bytes or bpe-N with 257 <= N <= 65535"
            )
        if self.end_of_text < 0:
            raise ConfigError(f"--data.end-of-text {self.end_of_text} is negative; token ids start at 0")


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """One optimizer step's tokens. The step is defined by `tokens`; how it is carried out changes nothing."""

    tokens: int
    """Tokens of one optimizer step, over all ranks and micro-batches."""
    sequence_tokens: int
    """Tokens of one sequence. Attention and positions never cross its border."""
    micro_tokens: int | None = None
    """Tokens of one forward and backward pass on one rank; a whole number of sequences. None: one sequence, or 65,536
    tokens if a sequence is shorter."""

    def __post_init__(self) -> None:
        if self.sequence_tokens < 1 or self.tokens < 1:
            raise ConfigError(
                f"--batch.tokens {self.tokens} and --batch.sequence-tokens {self.sequence_tokens} must be positive"
            )
        if self.tokens % self.sequence_tokens:
            fit = max(1, self.tokens // self.sequence_tokens) * self.sequence_tokens
            raise ConfigError(
                f"--batch.tokens {self.tokens:,} is not a whole number of sequences of {self.sequence_tokens:,} "
                f"tokens; use {fit:,} or change --batch.sequence-tokens"
            )
        micro = self.micro_tokens
        if micro is not None and (micro < 1 or micro % self.sequence_tokens or self.tokens % micro):
            raise ConfigError(
                f"--batch.micro-tokens {micro:,} must be a whole number of sequences ({self.sequence_tokens:,} tokens) "
                f"and divide --batch.tokens {self.tokens:,}"
            )

    @property
    def sequences(self) -> int:
        return self.tokens // self.sequence_tokens

    @property
    def micro_sequences(self) -> int:
        """Sequences of one forward pass on one rank: the largest number that divides the batch and fits the limit."""
        if self.micro_tokens is not None:
            return self.micro_tokens // self.sequence_tokens
        limit = max(1, DEFAULT_MICRO_TOKENS // self.sequence_tokens)
        return next(n for n in range(min(limit, self.sequences), 0, -1) if self.sequences % n == 0)


DEFAULT_MICRO_TOKENS = 65_536
"""The records' unit of work for one GPU."""
