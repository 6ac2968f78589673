"""Token shards: llm.c's file format, opened by checking the file and mapping it into memory.

A shard is 256 little-endian int32 words (magic, version, token count, zeros) and then that many uint16 token ids. The
size is compared with the header before anything is mapped, so a header that lies cannot make us allocate. Beside
`x.bin` lies its manifest `x.bin.json`; a shard without one (llm.c's own) is read all the same. Opening reads 1 KiB,
never the tokens: comparing the hash (0.5 GB/s a core) is the business of `verify`.
"""

import mmap
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paceline.core.errors import ConfigError, DataError
from paceline.core.schema import from_dict, read_json

MAGIC = 20240520
VERSION = 1
HEADER_WORDS = 256
HEADER_BYTES = HEADER_WORDS * 4
TOKEN_DTYPE = np.dtype("<u2")
MAX_VOCAB_SIZE = 65_535  # largest vocabulary whose ids, and one to spare, fit into uint16
SCAN_TOKENS = 1 << 22  # tokens compared in one go when a whole shard is searched: 8 MiB, which stays in the cache


@dataclass(frozen=True, kw_only=True)
class ShardManifest:
    """What a shard is said to hold; `x.bin.json` as a value."""

    tokens: int
    documents: int  # documents that begin in this shard
    max_token: int  # largest token id, so that a vocabulary can be checked without reading the tokens
    tokenizer: str  # fingerprint of the tokenizer that made the ids
    blake2b: str  # hash of the whole file, header included


@dataclass(frozen=True, eq=False)
class Shard:
    path: Path
    stream: np.ndarray
    manifest: ShardManifest | None
    mapped: mmap.mmap | None = None  # the file that `stream` is a view of

    @property
    def tokens(self) -> np.ndarray:
        """(n,) uint16, a read-only view of the file. Asked for anew at every read: reading what was cut off the file
        would end the process by a signal (SIGBUS), so the size is compared first, which takes 1 µs."""
        if self.mapped is not None and (size := self.mapped.size()) < HEADER_BYTES + self.stream.nbytes:
            counts = f"{size:,} bytes, its header counts {len(self):,} tokens"
            raise DataError(f"{self.path}: has become shorter while it was read: {counts}; fetch or prepare it again")
        return self.stream

    def __len__(self) -> int:
        return len(self.stream)


def open_shard(path: Path) -> Shard:
    """Check header, size and manifest, then map the tokens. Raises DataError naming the file."""
    count = _token_count(path)
    manifest = read_manifest(path)
    if manifest is not None and manifest.tokens != count:
        counts = f"the header counts {count:,} tokens, {manifest_path(path).name} {manifest.tokens:,}"
        raise DataError(f"{path}: {counts}; one of the two is not what was written, prepare the data again")
    with open(path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    stream = np.frombuffer(mapped, TOKEN_DTYPE, count, HEADER_BYTES)
    return Shard(path=path, stream=stream, manifest=manifest, mapped=mapped)


def _token_count(path: Path) -> int:
    """The header's token count, after checking it against the size of the file."""
    try:
        with open(path, "rb") as file:
            header = file.read(HEADER_BYTES)
        size = path.stat().st_size
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); check the path") from None
    if len(header) < HEADER_BYTES:
        raise DataError(f"{path}: {size:,} bytes, shorter than a shard's header of {HEADER_BYTES:,}; it is truncated")
    magic, version, count = (int(word) for word in np.frombuffer(header, dtype="<i4")[:3])
    if magic != MAGIC:
        raise DataError(f"{path}: word 0 is {magic}, not {MAGIC}; not a token shard, make one with `data prepare`")
    if version != VERSION:
        raise DataError(f"{path}: word 1 is {version}; only shards of version {VERSION} (uint16 ids) can be read")
    if count < 1:
        raise DataError(f"{path}: word 2 counts {count:,} tokens; an empty shard cannot be trained on, delete it")
    if size != (expected := HEADER_BYTES + count * TOKEN_DTYPE.itemsize):
        counts = f"{size:,} bytes, but its header counts {count:,} tokens, which take {expected:,}"
        damage = "truncated" if size < expected else "too long"
        raise DataError(f"{path}: {counts}; the file is {damage}, fetch or prepare it again")
    return count


def manifest_path(path: Path) -> Path:
    return path.with_name(path.name + ".json")


def read_manifest(path: Path) -> ShardManifest | None:
    """The manifest of the shard at `path`, or None where there is none."""
    sidecar = manifest_path(path)
    if not sidecar.exists():
        return None
    try:
        return from_dict(ShardManifest, read_json(sidecar))
    except ConfigError as error:
        at = "" if str(error).startswith(str(sidecar)) else f"{sidecar}: "
        raise DataError(f"{at}{error}; delete it to read the shard without its manifest") from None


def check_vocabulary(shard: Shard, vocab_size: int) -> None:
    """Raise DataError at the first token id that is not below `vocab_size`. A manifest answers without a scan."""
    if shard.manifest is not None and shard.manifest.max_token < vocab_size:
        return
    if int(shard.tokens.max()) >= vocab_size:
        place = int(np.argmax(shard.tokens >= vocab_size))
        raise DataError(
            f"{shard.path}: token {place:,} has id {int(shard.tokens[place])}, not below the vocabulary of "
            f"{vocab_size:,}; use --model.vocab-size {int(shard.tokens.max()) + 1} or more, or prepare the data again"
        )


def made_with_another(shards: Iterable[Shard], identity: Collection[str]) -> Shard | None:
    """The first shard whose manifest calls its tokenizer none of `identity`. Where either says nothing, they fit."""
    for shard in shards if identity else ():
        if shard.manifest and shard.manifest.tokenizer and shard.manifest.tokenizer not in identity:
            return shard
    return None


def positions_of(shard: Shard, token: int) -> np.ndarray:
    """Where `token` stands in the shard, (n,) int64 in rising order; with end-of-text, where documents begin."""
    found = [
        np.flatnonzero(shard.tokens[start : start + SCAN_TOKENS] == token) + start
        for start in range(0, len(shard), SCAN_TOKENS)
    ]
    return np.concatenate(found)
