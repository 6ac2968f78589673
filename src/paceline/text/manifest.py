"""`dataset.json`: what a prepared folder holds, and how far its preparation has come.

One file serves both, so that it cannot disagree with itself: it is written before the first shard, after every shard,
and at the end with `complete` set. It holds no time and no machine, so equal data have equal files.
"""

from dataclasses import dataclass
from pathlib import Path

from paceline.core.errors import ConfigError, DataError
from paceline.core.files import is_plain_name, write_json
from paceline.core.schema import from_dict, read_json, to_dict

FILE_NAME = "dataset.json"
FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Options:
    """The choices that the shards depend on."""

    name: str
    tokenizer: str
    field: str
    shard_tokens: int
    val_share: float
    stdin_format: str
    skip_bad: bool


@dataclass(frozen=True, kw_only=True)
class TokenizerEntry:
    name: str
    fingerprint: str
    vocab_size: int
    end_of_text: int
    training_text: str | None
    """Hash of the text it was trained on; None for one that was not trained here."""


@dataclass(frozen=True, kw_only=True)
class ShardEntry:
    file: str
    side: str
    tokens: int
    documents: int
    blake2b: str


@dataclass(frozen=True, kw_only=True)
class SourceEntry:
    name: str
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Position:
    """The first token of a side that no finished shard holds: `token` counts that side's tokens inside the chunk."""

    chunk: int = 0
    token: int = 0


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far the input was consumed when the last shard was written."""

    chunks: int = 0
    """Chunks of input read."""
    digest: str = ""
    """Hash over those chunks, by which a changed input is found out."""
    train: Position = Position()
    val: Position = Position()


@dataclass(frozen=True, kw_only=True)
class DatasetManifest:
    format: int = FORMAT
    complete: bool = False
    options: Options
    tokenizer: TokenizerEntry
    raised_val_share: float | None = None
    """Share that the documents are split by where `options.val_share` would leave none to validation."""
    shards: tuple[ShardEntry, ...] = ()
    progress: Progress = Progress()
    sources: tuple[SourceEntry, ...] = ()
    text_bytes: int = 0
    """Bytes of text, without the end-of-text tokens; this and `skipped` are known when complete."""
    skipped: int = 0
    """Bad records left out."""

    @property
    def val_share(self) -> float:
        """What the documents are split by."""
        return self.options.val_share if self.raised_val_share is None else self.raised_val_share

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    @property
    def documents(self) -> int:
        return sum(shard.documents for shard in self.shards)

    def side_tokens(self, side: str) -> int:
        return sum(shard.tokens for shard in self.shards if shard.side == side)


def read_dataset(folder: Path) -> DatasetManifest | None:
    """The folder's manifest, or None where there is none."""
    path = folder / FILE_NAME
    if not path.exists():
        return None
    try:
        manifest = from_dict(DatasetManifest, read_json(path))
    except ConfigError as error:
        at = "" if str(error).startswith(str(path)) else f"{path}: "
        raise DataError(f"{at}{error}; prepare the data again with --overwrite") from None
    if manifest.format != FORMAT:
        raise DataError(f"{path}: format {manifest.format}, this version reads {FORMAT}; prepare the data again")
    if strange := next((shard.file for shard in manifest.shards if not is_plain_name(shard.file)), None):
        raise DataError(f"{path}: lists {strange!r}, which is not a file of this folder; prepare the data again")
    return manifest


def write_dataset(folder: Path, manifest: DatasetManifest) -> None:
    write_json(folder / FILE_NAME, to_dict(manifest))
