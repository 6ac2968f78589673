"""Text to shards, in several processes, restartable at any moment.

The input is read in order, as chunks of about 1 MiB; processes encode chunks, this one joins the results in order, so
neither the number of processes nor a restart changes a byte. Shards are cut at exactly `shard_tokens`, through
documents, as llm.c's are. A shard appears under its name only when whole, then `dataset.json` notes it together with
the place in the input that follows. After a kill the input is read again, but only what no finished shard holds is
encoded; a hash over what was consumed tells whether it is the same input.
"""

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from paceline.core.environment import usable_cores
from paceline.core.errors import DataError
from paceline.core.units import human_count
from paceline.text.config import PrepareConfig
from paceline.text.continuation import begin, input_changed, only_writer, reader_of
from paceline.text.encode import Chunk, encode_in_order
from paceline.text.manifest import (
    DatasetManifest,
    Position,
    Progress,
    ShardEntry,
    SourceEntry,
    read_dataset,
    write_dataset,
)
from paceline.text.shard_writer import write_shard
from paceline.text.sources import Piece, Reader, Source, cut_ids, cut_lone_text, files_left_aside, find_sources
from paceline.text.split import Side

CHUNK_BYTES = 1 << 20
SMALL_INPUT_BYTES = 8 << 20  # below this, starting processes (0.5 s) costs more than they save
OTHERS_NAMED = 10
FIRST_NUMBER: dict[Side, int] = {"train": 1, "val": 0}


@dataclass(frozen=True)
class Status:
    bytes_read: int
    bytes_total: int  # 0 when the input's size is not known
    tokens: int
    shards: int

    def __str__(self) -> str:
        return f"{human_count(self.tokens)} tokens, {self.shards} shards"


def prepare(config: PrepareConfig, on_progress: Callable[[Status], None] = lambda _: None) -> DatasetManifest:
    """Carry out `config` and return the finished manifest. Calling it again continues, or finds all done."""
    config = config if config.ids_of is None else replace(config, tokenizer=config.ids_of)
    folder = Path(config.out)
    sources = _find(config, folder)
    with only_writer(folder):
        manifest = begin(folder, config, sources)
        reader = reader_of(config, manifest)
        run = _Run(folder, manifest, sources, reader, on_progress)
        run.consume(read_chunks(reader.pieces(sources, manifest.splits_by)), _workers(config, sources))
        return run.finish(files_left_aside(config.inputs, sources))


def _find(config: PrepareConfig, folder: Path) -> list[Source]:
    """The input. Of a preparation that an older version began, what that version read."""
    begun = None if config.overwrite else read_dataset(folder)
    is_old = begun is not None and begun.shards != () and begun.split is None
    sources = find_sources(config.inputs, config.stdin_format, ids=config.ids_of is not None, old=is_old)
    if config.ids_of is not None:
        return cut_ids(sources, config.val_share)
    unchanged = (config.on_bad_text == "error" and not config.skip_bad) or is_old
    as_it_is = config.encoding == "utf-8" and unchanged and config.document_separator is None
    return cut_lone_text(sources, config.val_share, old=is_old) if as_it_is else sources


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
    def __init__(self, side: Side, position: Position) -> None:
        self.side: Side = side
        self.position = position
        self._parts: list[np.ndarray] = []
        self.waiting = 0

    def add(self, tokens: np.ndarray, chunk: int) -> None:
        fresh = tokens[self.position.token :] if chunk == self.position.chunk else tokens
        self._parts.append(fresh)
        self.waiting += len(fresh)

    def take(self, count: int) -> np.ndarray:
        joined = np.concatenate(self._parts)
        self._parts, self.waiting = [joined[count:]], len(joined) - count
        return joined[:count]


@dataclass
class _Run:
    """The state of one preparation: what is finished, and what waits in memory."""

    folder: Path
    manifest: DatasetManifest
    sources: list[Source]
    reader: Reader
    on_progress: Callable[[Status], None]
    text_bytes: int = 0
    chunks_read: int = 0
    digest: str = ""

    def __post_init__(self) -> None:
        self.before = self.manifest.progress  # where the run that we continue had come to
        self.sides = (_Side("train", self.before.train), _Side("val", self.before.val))

    def consume(self, chunks: Iterable[Chunk], workers: int) -> None:
        named = self.reader.tokenizer or self.manifest.tokenizer.name
        stream = encode_in_order(map(self._admit, chunks), self.folder, named, workers)
        with contextlib.closing(stream) as encoded:  # ends the processes when a write fails
            for chunk, tokens in encoded:
                for side in self.sides:
                    side.add(tokens[side.side], chunk.number)
                    while side.waiting >= self.manifest.options.shard_tokens:
                        self._record(side, chunk, len(tokens[side.side]))
                self._report()

    def _admit(self, chunk: Chunk) -> Chunk:
        """Check the input against the run that we continue, and keep the pieces that no finished shard holds."""
        self.text_bytes += sum(len(piece.text) for piece in chunk.pieces if not piece.is_ids)
        self.chunks_read, self.digest = chunk.number + 1, chunk.digest
        if self.chunks_read == self.before.chunks and chunk.digest != self.before.digest:
            raise input_changed(self.folder, "its text is not the one that these shards were made from")
        if self.manifest.complete and self.chunks_read > self.before.chunks:
            raise input_changed(self.folder, "it has grown since these shards were finished")
        first = {side.side: side.position.chunk for side in self.sides}
        return replace(chunk, pieces=[piece for piece in chunk.pieces if chunk.number >= first[piece.side]])

    def _record(self, side: _Side, chunk: Chunk, chunk_tokens: int) -> None:
        """Write a full shard, then the manifest that knows it. A kill between the two makes the shard again, equal."""
        if chunk.number + 1 < self.before.chunks:
            raise input_changed(self.folder, "a shard fills earlier than it did")
        entry = self._write(side, self.manifest.options.shard_tokens)
        side.position = Position(chunk=chunk.number, token=chunk_tokens - side.waiting)
        train, val = (each.position for each in self.sides)
        progress = Progress(chunks=chunk.number + 1, digest=chunk.digest, train=train, val=val)
        self.manifest = replace(self.manifest, shards=(*self.manifest.shards, entry), progress=progress)
        write_dataset(self.folder, self.manifest)

    def _write(self, side: _Side, count: int) -> ShardEntry:
        number = FIRST_NUMBER[side.side] + sum(shard.side == side.side for shard in self.manifest.shards)
        path = self.folder / f"{self.manifest.options.name}_{side.side}_{number:06d}.bin"
        tokens, tokenizer = side.take(count), self.manifest.tokenizer
        documents = int(np.count_nonzero(tokens == tokenizer.end_of_text))
        written = write_shard(path, tokens, documents=documents, tokenizer=tokenizer.fingerprint)
        return ShardEntry(file=path.name, side=side.side, tokens=count, documents=documents, blake2b=written.blake2b)

    def _report(self) -> None:
        total = 0 if any(source.path is None for source in self.sources) else sum(s.bytes for s in self.sources)
        tokens = self.manifest.tokens + sum(side.waiting for side in self.sides)
        self.on_progress(Status(self.reader.bytes_read, total, tokens, len(self.manifest.shards)))

    def finish(self, others: list[str]) -> DatasetManifest:
        """Write each side's last shard, and the manifest with `complete` set. `others`: files that were not read."""
        if self.chunks_read < self.before.chunks:
            raise input_changed(self.folder, "it has become shorter")
        if self.manifest.complete:
            return self.manifest
        lost = self.reader.lost
        last = [self._write(side, side.waiting) for side in self.sides if side.waiting]
        if not self.manifest.shards and not last:
            left_out = f", and bad ones were left out ({lost.first})" if lost.first else ""
            raise DataError(f"{self.sources[0].place}: no documents there{left_out}; nothing to write")
        done = Position(chunk=self.chunks_read)
        self.manifest = replace(
            self.manifest,
            complete=True,
            shards=tuple(sorted((*self.manifest.shards, *last), key=lambda entry: entry.file)),
            progress=Progress(chunks=self.chunks_read, digest=self.digest, train=done, val=done),
            sources=tuple(SourceEntry(name=source.name, bytes=source.bytes) for source in self.sources),
            text_bytes=self.text_bytes,
            skipped=lost.records,
            skipped_lines=lost.lines,
            skipped_line_bytes=lost.line_bytes,
            replaced_bytes=lost.replaced_bytes,
            other_files=len(others),
            other_names=tuple(others[:OTHERS_NAMED]),
        )
        write_dataset(self.folder, self.manifest)
        return self.manifest


def _workers(config: PrepareConfig, sources: list[Source]) -> int:
    if config.ids_of is not None:  # nothing to encode
        return 1
    small = all(source.path for source in sources) and sum(source.bytes for source in sources) < SMALL_INPUT_BYTES
    return config.workers or (1 if small else usable_cores())
