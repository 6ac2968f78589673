"""`dataset.json`: what a prepared folder holds, and how far its preparation has come.

It is written before the first shard, after every shard, and at the end with `complete` set. It holds no time and no
machine, so equal data have equal files.
"""

from dataclasses import dataclass
from pathlib import Path

from paceline.core.errors import ConfigError, DataError
from paceline.core.files import is_plain_name, write_json
from paceline.core.schema import from_dict, read_json, to_dict

FILE_NAME = "dataset.json"
FORMAT = 1
LOUD_SHARE = 0.01  # lost text beyond this part is a warning


@dataclass(frozen=True, kw_only=True)
class Options:
    name: str
    tokenizer: str
    field: str
    shard_tokens: int
    val_share: float
    stdin_format: str
    skip_bad: bool
    on_bad_text: str = "error"
    encoding: str = "utf-8"
    document_separator: str | None = None
    ids_of: str | None = None


@dataclass(frozen=True, kw_only=True)
class ValSplit:
    share: float  # those whose hash, as a fraction of 2^64, is below
    cut: str | None = None  # hash of the one document whose end does, in hex digits
    cut_at: int = 0  # bytes of it that stay in training, up to the end of a line or word
    cut_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class TokenizerEntry:
    name: str
    fingerprint: str
    vocab_size: int
    end_of_text: int
    training_text: str | None  # hash of the text it was trained on; None for one that was not trained here


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

    chunks: int = 0  # chunks of input read
    digest: str = ""  # hash over those chunks, by which a changed input is found out
    train: Position = Position()
    val: Position = Position()


@dataclass(frozen=True, kw_only=True)
class DatasetManifest:
    format: int = FORMAT
    complete: bool = False
    options: Options
    tokenizer: TokenizerEntry
    split: ValSplit | None = None
    """None: of a version that split by the number of documents, dropped a whole file for a bad byte and read fewer
    kinds of files; such a preparation continues by those rules."""
    raised_val_share: float | None = None
    """Of such a version: what the documents are split by where `options.val_share` left none to validation."""
    shards: tuple[ShardEntry, ...] = ()
    progress: Progress = Progress()
    sources: tuple[SourceEntry, ...] = ()
    text_bytes: int = 0  # bytes of text, without the end-of-text tokens; this and `skipped` are known when complete
    skipped: int = 0  # bad records left out
    skipped_lines: int = 0  # bad lines of text files left out
    skipped_line_bytes: int = 0
    replaced_bytes: int = 0  # bad bytes that were replaced by U+FFFD
    other_files: int = 0  # files of the input folders that were not read, `other_names` the first of them
    other_names: tuple[str, ...] = ()

    @property
    def splits_by(self) -> ValSplit:
        raised = self.options.val_share if self.raised_val_share is None else self.raised_val_share
        return self.split or ValSplit(share=raised)

    @property
    def lost_share(self) -> float:
        """Part of the text that was left out or replaced: of its bytes or, where that is more, of its records."""
        lost_bytes = self.skipped_line_bytes + self.replaced_bytes
        of_bytes = lost_bytes / max(1, self.text_bytes + self.skipped_line_bytes)
        return max(of_bytes, self.skipped / max(1, self.documents + self.skipped))

    @property
    def lost_much(self) -> str | None:
        if self.lost_share <= LOUD_SHARE:
            return None
        encoding, field = self.options.encoding, self.options.field
        return (
            f"{self.lost_share:.1%} of the input could not be read and is lost; if it is not in {encoding}, name its "
            f"--encoding, and if the text is not in {field!r}, its --field, with --overwrite"
        )

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    @property
    def documents(self) -> int:
        return sum(shard.documents for shard in self.shards)

    def side_tokens(self, side: str) -> int:
        return sum(shard.tokens for shard in self.shards if shard.side == side)


def read_dataset(folder: Path) -> DatasetManifest | None:
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
