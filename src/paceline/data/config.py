"""What is read, in which order, and how it is cut into batches. No torch."""

from dataclasses import dataclass
from typing import Literal

from paceline.core.errors import ConfigError
from paceline.data.public import PUBLIC

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
        if not known and not (
            self.tokenizer.startswith("bpe-") and size.isascii() and size.isdigit() and 257 <= int(size) <= 65_535
        ):
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
    tokens if a sequence is shorter, and less where memory is short (`train.ladder`)."""

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


@dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """Text to shards. Running the same command again continues where it was stopped."""

    inputs: tuple[str, ...]
    """Files (.txt, .md, .jsonl, .jsonl.gz, .parquet), folders of them, - for standard input, or hf:NAME:CONFIG:SPLIT
    for a dataset of the Hugging Face hub, as a stream (needs the package datasets)."""
    out: str
    """Folder for the shards, the tokenizer and dataset.json."""
    name: str = "data"
    """First part of the shards' names: NAME_train_000001.bin, NAME_val_000000.bin."""
    tokenizer: str = "gpt2"
    """`gpt2`, `bytes`, `bpe-N` (trained on the start of the training text), or a folder that carries a tokenizer."""
    field: str = "text"
    """Field or column that holds the text, in .jsonl and .parquet."""
    shard_tokens: int = 100_000_000
    """Tokens of a shard. Documents may straddle shards; the last one is shorter."""
    val_share: float = 0.005
    """Share of the documents that goes to validation, chosen by a hash of their text; of few documents more than that,
    so that there is validation at all. A single .txt or .md is cut in two."""
    stdin_format: Literal["text", "jsonl"] = "text"
    """Standard input is one document, or one JSON object a line."""
    skip_bad: bool = False
    """Leave out records that cannot be read, and count them, instead of stopping at the first."""
    workers: int | None = None
    """Processes that tokenize; None: one for each core. The result does not depend on it."""
    overwrite: bool = False
    """Delete what an earlier run left in the folder and begin again."""

    def __post_init__(self) -> None:
        if not self.inputs:
            raise ConfigError("no input is given; name files or folders, or - for standard input")
        if not 1 <= self.shard_tokens < 2**31:
            raise ConfigError(f"--shard-tokens {self.shard_tokens} is outside 1 to 2^31 - 1, what a shard can count")
        if not 0 <= self.val_share < 1:
            raise ConfigError(f"--val-share {self.val_share} is outside [0, 1); 0.005 is one document in 200")
        if self.workers is not None and self.workers < 1:
            raise ConfigError(f"--workers {self.workers} must be at least 1")
        if not self.name or not all(letter.isalnum() or letter in "._-" for letter in self.name):
            raise ConfigError(f"--name {self.name!r} may hold letters, digits, dots, dashes and underscores only")


@dataclass(frozen=True, kw_only=True)
class DownloadConfig:
    """Public data to a folder. Running the same command again continues where it was stopped."""

    name: str
    """Which data."""
    out: str | None = None
    """Folder for the files; data/NAME otherwise, where the records look for theirs."""
    shards: int | None = None
    """Only the first so many training files; the validation files always come along."""

    def __post_init__(self) -> None:
        if self.name not in PUBLIC:
            raise ConfigError(f"no public data called {self.name!r}; there are {', '.join(PUBLIC)}")
        if self.shards is not None and self.shards < 1:
            raise ConfigError(f"--shards {self.shards} must be at least 1")
