"""What `data prepare` and `data download` are asked for, and the public data by names of ours. No torch."""

from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal

import tyro

from paceline.core.command_line import Positional
from paceline.core.errors import ConfigError
from paceline.text.byte_streams import check_encoding
from paceline.text.separator import compile_separator

GPT2_END_OF_TEXT = 50_256
DATA = Path("data")  # where public data go, and where the records look for theirs


@dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    inputs: Positional[Annotated[tuple[str, ...], tyro.conf.arg(metavar="INPUT [INPUT ...]")]]
    """Files (.txt, .md, .jsonl, .json, .csv, these also packed as .gz, .bz2, .xz or .zst; .parquet, .arrow), folders of
    them, - for standard input, or hf:NAME:CONFIG:SPLIT for a dataset of the Hugging Face hub, as a stream (needs the
    package datasets). With --ids-of, files of token ids."""
    out: str
    """Folder for the shards, the tokenizer and dataset.json."""
    name: str = "data"
    """First part of the shards' names: NAME_train_000001.bin, NAME_val_000000.bin."""
    tokenizer: str = "gpt2"
    """`gpt2`, `bytes`, `bpe-N` (trained on the start of the training text), or a folder that carries a tokenizer."""
    field: str = "text"
    """Field or column that holds the text, in .jsonl, .json, .csv, .parquet and .arrow."""
    document_separator: str | None = None
    """What parts the documents inside a .txt or .md: a string (`<|endoftext|>`; one of punctuation alone, as `%%`, only
    where it is a line of its own), `blank-lines`, or `re:EXPRESSION`. None: a file is one document."""
    ids_of: str | None = None
    """The inputs are token ids, .npy or .bin as nanoGPT and llm.c write them, of this tokenizer: `gpt2`, `bytes` or a
    folder that carries it."""
    shard_tokens: int = 100_000_000
    """Tokens of a shard. Documents may straddle shards; the last one is shorter."""
    val_share: float = 0.005
    """Share of the text, in bytes, that goes to validation: documents chosen by a hash of their text, and the end of
    one where whole ones do not fit. At least 4 KiB, at most half. A single .txt or .md is cut in two."""
    stdin_format: Literal["text", "jsonl"] = "text"
    """Standard input is one document, or one JSON object a line."""
    on_bad_text: Literal["error", "replace", "skip-line"] = "error"
    """Text that cannot be read: stop, replace each run of bad bytes by U+FFFD, or leave out the line or record. What is
    lost is counted."""
    skip_bad: bool = False
    """The same as --on-bad-text skip-line."""
    encoding: str = "utf-8"
    """Of text, JSON and CSV, as Python calls it: utf-8, utf-16, cp1252."""
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
        if self.skip_bad and self.on_bad_text == "replace":
            raise ConfigError("--skip-bad leaves bad text out, --on-bad-text replace keeps it; give one of them")
        if self.ids_of is not None and (self.tokenizer not in ("gpt2", self.ids_of) or self.ids_of.startswith("bpe-")):
            own = "names the tokenizer by itself, gpt2, bytes or a folder"
            raise ConfigError(f"--ids-of {self.ids_of}: {own}; leave out --tokenizer")
        if self.document_separator is not None:
            compile_separator(self.document_separator)
        check_encoding(self.encoding)
        if self.workers is not None and self.workers < 1:
            raise ConfigError(f"--workers {self.workers} must be at least 1")
        if not self.name or not all(letter.isalnum() or letter in "._-" for letter in self.name):
            raise ConfigError(f"--name {self.name!r} may hold letters, digits, dots, dashes and underscores only")


@dataclass(frozen=True, kw_only=True)
class PublicData:
    repo: str  # a dataset on the Hugging Face hub
    train: str  # pattern of the training files, of which `--shards` takes the first
    val: str | None = None  # pattern of files that are always fetched
    about: str

    @property
    def tokenized(self) -> bool:
        """Shards to train on, not text that `data prepare` must read first."""
        return self.train.endswith(".bin")


def _shards(repo: str, stem: str, about: str) -> PublicData:
    return PublicData(repo=repo, train=f"{stem}_train_*.bin", val=f"{stem}_val_*.bin", about=about)


def _text(name: str) -> PublicData:
    about = f"{name}'s sample of 10 B tokens as text, for `data prepare`"
    return PublicData(repo=f"HuggingFaceFW/{name.lower()}", train="sample/10BT/*.parquet", about=about)


SHARDS = "GPT-2 tokens in shards of about 100 M"
PUBLIC = {
    "fineweb10B": _shards("kjj0/fineweb10B-gpt2", "fineweb", f"FineWeb, {SHARDS}: what the records were trained on"),
    "fineweb100B": _shards("kjj0/fineweb100B-gpt2", "fineweb", "ten times as much of it"),
    "fineweb-edu": _shards("kjj0/finewebedu10B-gpt2", "finewebedu", f"FineWeb-Edu, {SHARDS}"),
    "fineweb10B-text": _text("FineWeb"),
    "fineweb-edu-text": _text("FineWeb-Edu"),
}


def matches(file: str, pattern: str) -> bool:
    """Whether a file of a dataset fits a pattern. A star stays inside one folder, so that no name leads elsewhere."""
    path = PurePosixPath(file)
    return path.match(pattern) and len(path.parts) == len(PurePosixPath(pattern).parts)


def how_to_get(folder: Path) -> str:
    public = PUBLIC.get(folder.name)
    if public is None or not public.tokenized:
        return "make it with `paceline data prepare`"
    elsewhere = "" if folder == DATA / folder.name else f" --out {folder}"
    return f"`paceline data download {folder.name}{elsewhere}` fetches it"


@dataclass(frozen=True, kw_only=True)
class DownloadConfig:
    name: Positional[Annotated[str, tyro.conf.arg(metavar="NAME")]]
    """Which data; they are listed above."""
    out: str | None = None
    """Folder for the files; data/NAME otherwise, where the records look for theirs."""
    shards: int | None = None
    """Only the first so many training files; the validation files always come along."""

    def __post_init__(self) -> None:
        if self.name not in PUBLIC:
            raise ConfigError(f"no public data called {self.name!r}; there are {', '.join(PUBLIC)}")
        if self.shards is not None and self.shards < 1:
            raise ConfigError(f"--shards {self.shards} must be at least 1")

    @property
    def folder(self) -> Path:
        return DATA / self.name if self.out is None else Path(self.out)
