"""Text to shards, in several processes, restartable at any moment.

The input is read once, in order, as chunks of about 1 MiB; processes encode chunks, this one joins the results in
order, so neither the number of processes nor a restart changes a byte. Every document is opened by end-of-text and
shards are cut at exactly `shard_tokens`, through documents, as llm.c's are. A shard appears under its name only when
whole, then `dataset.json` notes it together with the place in the input that follows it. After a kill the input is
read again but only what no finished shard holds is encoded; a hash over what was consumed tells whether it is still
the same input. The unfinished shard in memory is what a kill costs.
"""

import contextlib
import dataclasses
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

try:
    import fcntl
except ImportError:  # not on Windows, where a second writer goes unnoticed
    fcntl = None  # type: ignore[assignment]

from paceline.core.environment import usable_cores
from paceline.core.errors import ConfigError, DataError
from paceline.core.files import blake2b_of
from paceline.core.schema import changes
from paceline.data.config import PrepareConfig
from paceline.data.encode import encode_in_order
from paceline.data.manifest import (
    FILE_NAME,
    DatasetManifest,
    Options,
    Position,
    Progress,
    ShardEntry,
    SourceEntry,
    TokenizerEntry,
    read_dataset,
    write_dataset,
)
from paceline.data.shards import write_shard
from paceline.data.sources import Piece, Reader, Side, Source, cut_lone_text, find_sources
from paceline.data.tokenizer import FILE_NAME as TOKENIZER_FILE
from paceline.data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer

CHUNK_BYTES = 1 << 20
TRAINING_BYTES = 64 << 20
"""Text that a tokenizer is trained on, from the start of the training side; more changes few merges."""
SMALL_INPUT_BYTES = 8 << 20
"""Below this, starting processes (0.5 s) costs more than they save."""
FIRST_NUMBER: dict[Side, int] = {"train": 1, "val": 0}


@dataclass(frozen=True)
class Chunk:
    """Consecutive pieces of the input. `digest` is the hash of the input up to its end."""

    number: int
    pieces: list[Piece]
    digest: str


@dataclass(frozen=True)
class Status:
    """How far a preparation is, for whoever shows it."""

    bytes_read: int
    bytes_total: int
    """0 when the input's size is not known."""
    tokens: int
    shards: int


def prepare(config: PrepareConfig, on_progress: Callable[[Status], None] = lambda _: None) -> DatasetManifest:
    """Carry out `config` and return the finished manifest. Calling it again continues, or finds all done."""
    sources = cut_lone_text(find_sources(config.inputs, config.stdin_format), config.val_share)
    folder = Path(config.out)
    with _only_writer(folder):
        manifest = _begin(folder, config, sources)
        reader = Reader(config.field, skip_bad=config.skip_bad)
        run = _Run(folder, manifest, sources, reader, on_progress)
        run.consume(read_chunks(reader.pieces(sources, config.val_share)), _workers(config, sources))
        return run.finish()


def read_chunks(pieces: Iterable[Piece]) -> Iterator[Chunk]:
    """Group pieces until a chunk is full. The grouping depends on nothing but the input."""
    digest = hashlib.blake2b(digest_size=16)
    held: list[Piece] = []
    size, number = 0, 0
    for piece in pieces:
        held.append(piece)
        size += len(piece.text)
        digest.update(b"%d %d %s\n" % (len(piece.text), piece.opens, piece.side.encode()))
        digest.update(piece.text)
        if size >= CHUNK_BYTES:
            yield Chunk(number, held, digest.hexdigest())
            held, size, number = [], 0, number + 1
    if held:
        yield Chunk(number, held, digest.hexdigest())


class _Side:
    """One side's tokens on their way into shards."""

    def __init__(self, side: Side, position: Position, shards: int) -> None:
        self.side: Side = side
        self.position = position
        self.number = FIRST_NUMBER[side] + shards
        self._parts: list[np.ndarray] = []
        self.waiting = 0

    def add(self, tokens: np.ndarray, chunk: int) -> None:
        fresh = tokens[self.position.token :] if chunk == self.position.chunk else tokens
        self._parts.append(fresh)
        self.waiting += len(fresh)

    def take(self, count: int) -> np.ndarray:
        """The first `count` waiting tokens; the rest keeps waiting."""
        joined = np.concatenate(self._parts)
        self._parts, self.waiting = [joined[count:]], len(joined) - count
        self.number += 1
        return joined[:count]


class _Run:
    """The state of one preparation: what is finished, and what waits in memory."""

    def __init__(
        self,
        folder: Path,
        manifest: DatasetManifest,
        sources: list[Source],
        reader: Reader,
        on_progress: Callable[[Status], None],
    ) -> None:
        self.folder, self.manifest, self.sources, self.reader = folder, manifest, sources, reader
        self.on_progress = on_progress
        self.before = manifest.progress
        """Where the run that we continue had come to."""
        self.sides = (self._side("train", self.before.train), self._side("val", self.before.val))
        self.text_bytes = 0
        self.chunks_read, self.digest = 0, ""

    def _side(self, side: Side, position: Position) -> _Side:
        return _Side(side, position, shards=sum(shard.side == side for shard in self.manifest.shards))

    def consume(self, chunks: Iterable[Chunk], workers: int) -> None:
        encoded = encode_in_order(map(self._admit, chunks), self.folder, self.manifest.tokenizer.name, workers)
        for chunk, tokens in encoded:
            for side in self.sides:
                side.add(tokens[side.side], chunk.number)
                while side.waiting >= self.manifest.options.shard_tokens:
                    self._record(side, chunk, len(tokens[side.side]))
            self._report()

    def _admit(self, chunk: Chunk) -> Chunk:
        """Check the input against the run that we continue, and keep the pieces that no finished shard holds."""
        self.text_bytes += sum(len(piece.text) for piece in chunk.pieces)
        self.chunks_read, self.digest = chunk.number + 1, chunk.digest
        if self.chunks_read == self.before.chunks and chunk.digest != self.before.digest:
            raise self._changed("its text is not the one that these shards were made from")
        if self.manifest.complete and self.chunks_read > self.before.chunks:
            raise self._changed("it has grown since these shards were finished")
        first = {side.side: side.position.chunk for side in self.sides}
        return replace(chunk, pieces=[piece for piece in chunk.pieces if chunk.number >= first[piece.side]])

    def _changed(self, how: str) -> DataError:
        return DataError(
            f"{self.folder / FILE_NAME}: the input has changed, {how}; give the old input, another --out, or begin "
            f"again with --overwrite"
        )

    def _record(self, side: _Side, chunk: Chunk, chunk_tokens: int) -> None:
        """Write a full shard, then the manifest that knows it. A kill between the two makes the shard again, equal."""
        if chunk.number + 1 < self.before.chunks:
            raise self._changed("a shard fills earlier than it did")
        entry = self._write(side, self.manifest.options.shard_tokens)
        side.position = Position(chunk=chunk.number, token=chunk_tokens - side.waiting)
        train, val = (each.position for each in self.sides)
        progress = Progress(chunks=chunk.number + 1, digest=chunk.digest, train=train, val=val)
        self.manifest = replace(self.manifest, shards=(*self.manifest.shards, entry), progress=progress)
        write_dataset(self.folder, self.manifest)

    def _write(self, side: _Side, count: int) -> ShardEntry:
        path = self.folder / f"{self.manifest.options.name}_{side.side}_{side.number:06d}.bin"
        tokens, tokenizer = side.take(count), self.manifest.tokenizer
        documents = int(np.count_nonzero(tokens == tokenizer.end_of_text))
        written = write_shard(path, tokens, documents=documents, tokenizer=tokenizer.fingerprint)
        return ShardEntry(file=path.name, side=side.side, tokens=count, documents=documents, blake2b=written.blake2b)

    def _report(self) -> None:
        total = 0 if any(source.path is None for source in self.sources) else sum(s.bytes for s in self.sources)
        tokens = self.manifest.tokens + sum(side.waiting for side in self.sides)
        self.on_progress(Status(self.reader.bytes_read, total, tokens, len(self.manifest.shards)))

    def finish(self) -> DatasetManifest:
        """Write each side's last, shorter shard, and the manifest that closes the dataset."""
        if self.chunks_read < self.before.chunks:
            raise self._changed("it has become shorter")
        if self.manifest.complete:
            return self.manifest
        last = [self._write(side, side.waiting) for side in self.sides if side.waiting]
        if not self.manifest.shards and not last:
            raise DataError(f"{self.sources[0].path or self.sources[0].name}: no documents there; nothing to write")
        done = Position(chunk=self.chunks_read)
        self.manifest = replace(
            self.manifest,
            complete=True,
            shards=tuple(sorted((*self.manifest.shards, *last), key=lambda entry: entry.file)),
            progress=Progress(chunks=self.chunks_read, digest=self.digest, train=done, val=done),
            sources=tuple(SourceEntry(name=source.name, bytes=source.bytes) for source in self.sources),
            text_bytes=self.text_bytes,
            skipped=self.reader.skipped,
        )
        write_dataset(self.folder, self.manifest)
        return self.manifest


def _begin(folder: Path, config: PrepareConfig, sources: list[Source]) -> DatasetManifest:
    """The manifest to continue from, or a new one, with the tokenizer in its place."""
    for leftover in folder.glob(".*.tmp"):  # of a run that was killed
        leftover.unlink()
    if config.overwrite:
        _clear(folder, config.name)
    if (found := read_dataset(folder)) is not None:
        _check_continuation(folder, found, config, sources)
        return found
    if strangers := sorted(_shard_files(folder, config.name)):
        raise DataError(
            f"{strangers[0]}: there already, and no {FILE_NAME} accounts for it; use another --out or --name, or "
            f"--overwrite to delete it"
        )
    tokenizer, training_text = _make_tokenizer(config, sources)
    tokenizer.save(folder)
    manifest = DatasetManifest(options=_options(config), tokenizer=_entry(tokenizer, training_text))
    write_dataset(folder, manifest)
    return manifest


def _check_continuation(folder: Path, found: DatasetManifest, config: PrepareConfig, sources: list[Source]) -> None:
    """Refuse to continue with other options, a damaged shard, or another text for the tokenizer."""
    if changed := changes(found.options, _options(config)):
        first = changed[0]
        raise ConfigError(
            f"--{first.field.replace('_', '-')} {first.after}: {folder / FILE_NAME} was begun with {first.before}; "
            f"use that, another --out, or begin again with --overwrite"
        )
    for shard in found.shards:
        path = folder / shard.file
        if not path.exists() or blake2b_of(path) != shard.blake2b:
            raise DataError(f"{path}: missing or damaged since it was written; begin again with --overwrite")
    if load_tokenizer(folder, found.tokenizer.name).fingerprint != found.tokenizer.fingerprint:
        raise DataError(
            f"{folder}: its tokenizer is not the one its shards were made with; begin again with --overwrite"
        )
    if (expected := found.tokenizer.training_text) and _hash_of(_training_text(config, sources)) != expected:
        raise DataError(
            f"{folder / FILE_NAME}: the text that its tokenizer was trained on has changed; give the old input, "
            f"another --out, or begin again with --overwrite"
        )


def _make_tokenizer(config: PrepareConfig, sources: list[Source]) -> tuple[Tokenizer, str | None]:
    """The tokenizer, and the hash of the text it was trained on, if it was."""
    if Path(config.tokenizer).is_dir():
        return load_tokenizer(config.tokenizer, config.tokenizer), None
    if not config.tokenizer.startswith("bpe-"):
        return load_tokenizer(None, config.tokenizer), None
    texts = _training_text(config, sources)
    return train_tokenizer(config.tokenizer, (text.decode() for text in texts)), _hash_of(texts)


def _training_text(config: PrepareConfig, sources: list[Source]) -> list[bytes]:
    if any(source.path is None for source in sources):
        raise ConfigError(
            f"--tokenizer {config.tokenizer} is trained on the text first, but standard input can be read only once; "
            f"give a file, or --tokenizer gpt2, bytes or a folder that carries one"
        )
    texts: list[bytes] = []
    size = 0
    for piece in Reader(config.field, skip_bad=config.skip_bad).pieces(sources, config.val_share):
        if size >= TRAINING_BYTES:
            break
        if piece.side == "train":
            texts.append(piece.text)
            size += len(piece.text)
    return texts


def _hash_of(texts: Iterable[bytes]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for text in texts:
        digest.update(b"%d\n" % len(text))
        digest.update(text)
    return digest.hexdigest()


def _entry(tokenizer: Tokenizer, training_text: str | None) -> TokenizerEntry:
    return TokenizerEntry(
        name=tokenizer.name,
        fingerprint=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        end_of_text=tokenizer.end_of_text,
        training_text=training_text,
    )


def _options(config: PrepareConfig) -> Options:
    names = [field.name for field in dataclasses.fields(Options)]
    return Options(**{name: getattr(config, name) for name in names})


def _workers(config: PrepareConfig, sources: list[Source]) -> int:
    known = all(source.path is not None for source in sources)
    small = known and sum(source.bytes for source in sources) < SMALL_INPUT_BYTES
    return config.workers or (1 if small else usable_cores())


def _shard_files(folder: Path, name: str) -> list[Path]:
    return [path for side in FIRST_NUMBER for path in folder.glob(f"{name}_{side}_*.bin*")]


def _clear(folder: Path, name: str) -> None:
    """Delete what a run of ours wrote. The manifest goes first, so that it never lists what is gone."""
    with contextlib.suppress(DataError):  # a damaged manifest is what --overwrite may be for
        name = found.options.name if (found := read_dataset(folder)) else name
    (folder / FILE_NAME).unlink(missing_ok=True)
    for path in (*_shard_files(folder, name), folder / TOKENIZER_FILE):
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def _only_writer(folder: Path) -> Iterator[None]:
    """Make the folder and hold it against a second `prepare`. The lock goes with the process, however it ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"--out {folder}: cannot be made a folder ({error.strerror}); name another") from None
    if fcntl is None:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        _lock(handle, folder)
        yield
    finally:
        os.close(handle)


def _lock(handle: int, folder: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise DataError(f"--out {folder}: another process prepares data there; wait for it or name another") from None
