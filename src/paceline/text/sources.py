"""Input files to documents, and documents to pieces of bounded size.

A .txt or .md file is one document, a line of .jsonl and a row of .parquet or of the hub's datasets is one; text is
taken byte for byte. Everything is read as a stream, so a document may be larger than memory. A long document is cut
only where every tokenizer here starts a new word whatever surrounds it, so that pieces can be encoded apart and joined.
Rows of the hub are not kept on the disk, so a preparation that is continued reads those before its stopping place
again; for all of a large dataset `data download` is the better way.
"""

import codecs
import gzip
import hashlib
import itertools
import re
import sys
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Literal

from paceline.core.errors import DataError
from paceline.text.long_lines import spool_text
from paceline.text.records import (
    HUB_PREFIX,
    LongTextOrProblem,
    TextOrProblem,
    checked_text,
    hub_rows,
    not_utf8,
    parquet_batches,
    parse_line,
    parse_stream,
)

STANDARD_INPUT = "-"
KINDS = {".txt": "txt", ".md": "txt", ".jsonl": "jsonl", ".jsonl.gz": "jsonl.gz", ".parquet": "parquet"}
BLOCK_BYTES = 1 << 20
PIECE_CHARS = 1 << 20
LONGEST_PIECE_CHARS = 2 * PIECE_CHARS
"""A text without a place to cut it is cut here all the same: a tokenizer needs 130 bytes for a character of a word."""
LONG_LINE_BYTES = 4 << 20
"""A line of JSON from this size on is not held in memory."""
SAFE_CUT = re.compile(r"\S(?= \S)|\S\n(?=\S)")
"""GPT-2's word rule starts a word at a lone space before text, and after a lone line break; the cut is the match's end.
What Python calls white space includes all that the tokenizers' regular expressions do."""

Side = Literal["train", "val"]


@dataclass(frozen=True)
class Source:
    """A file, or a part of one. `path` None is standard input, or a stream of kind `hf`."""

    path: Path | None
    name: str
    kind: str
    bytes: int
    start: int = 0
    first_line: int = 1
    side: Side | None = None
    """Where its documents go; None: each by its hash."""

    @property
    def only_once(self) -> bool:
        """Whether it cannot be read a second time."""
        return self.path is None and self.kind != "hf"

    @property
    def place(self) -> str:
        return str(self.path or self.name)


@dataclass(frozen=True)
class Piece:
    """A document or a part of one. `opens`: it begins a document."""

    text: bytes
    opens: bool
    side: Side


def find_sources(inputs: Sequence[str], stdin_format: str) -> list[Source]:
    """Every file the inputs name, folders searched in sorted order."""
    sources: list[Source] = []
    for given in inputs:
        if given == STANDARD_INPUT:
            kind = "txt" if stdin_format == "text" else "jsonl"
            sources.append(Source(path=None, name="standard input", kind=kind, bytes=0))
        elif given.startswith(HUB_PREFIX):
            parse_stream(given)
            sources.append(Source(path=None, name=given, kind="hf", bytes=0))
        elif Path(given).is_dir():
            sources += _search_folder(Path(given))
        else:
            sources.append(_file_source(Path(given), Path(given).name))
    return sources


def _search_folder(folder: Path) -> list[Source]:
    paths = [path for path in folder.rglob("*") if path.is_file() and _kind_of(path)]
    found = [_file_source(path, path.relative_to(folder).as_posix()) for path in paths]
    if not found:
        raise DataError(f"{folder}: no {', '.join(KINDS)} files there; name the folder that holds the text")
    return sorted(found, key=lambda source: source.name)


def _file_source(path: Path, name: str) -> Source:
    if not path.exists():
        raise DataError(f"{path}: does not exist; name a file, a folder, or - for standard input")
    kind = _kind_of(path)
    if kind is None:
        raise DataError(f"{path}: not a kind of file that can be read; use {', '.join(KINDS)}")
    try:
        return Source(path=path, name=name, kind=kind, bytes=path.stat().st_size)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); check the path") from None


def _kind_of(path: Path) -> str | None:
    return next((kind for suffix, kind in KINDS.items() if path.name.endswith(suffix)), None)


def cut_lone_text(sources: list[Source], val_share: float) -> list[Source]:
    """If a single .txt or .md is all there is, its end becomes the validation document, else nothing would. It is cut
    after a line or, in the last line, where `_cut_in_line` finds a place."""
    if len(sources) != 1 or sources[0].kind != "txt" or sources[0].path is None or val_share == 0:
        return sources
    whole = sources[0]
    with _open(whole) as file:
        file.seek(start := int(whole.bytes * (1 - val_share)))
        line = file.readline()
        cut = file.tell()
        if cut == whole.bytes and start > 0:
            cut = start + _cut_in_line(line)
        file.seek(0)
        lines = sum(block.count(b"\n") for block in _blocks(file, cut))
    train = replace(whole, bytes=cut, side="train")
    val = replace(whole, bytes=whole.bytes - cut, start=cut, first_line=lines + 1, side="val")
    return [train, val] if cut < whole.bytes else [train]


def _cut_in_line(line: bytes) -> int:
    """A place in the line to cut it: after a space, else before a character; its length where only blanks would follow.
    The line may begin inside a character."""
    text = line.rstrip()
    characters = (place for place, byte in enumerate(text) if byte & 0xC0 != 0x80)  # not a later byte of one
    return text.find(b" ") + 1 or next(characters, len(line))


def _blocks(file: IO[bytes], length: int) -> Iterator[bytes]:
    """The next `length` bytes of the file, a block at a time."""
    while block := file.read(min(BLOCK_BYTES, length)):
        length -= len(block)
        yield block


class Reader:
    """Reads sources, stops at a bad record or counts it, and knows how far it has come."""

    def __init__(self, field: str, *, skip_bad: bool = False) -> None:
        self.field, self.skip_bad = field, skip_bad
        self.skipped = 0
        self.bytes_read = 0  # of the input files, for the progress bar

    def pieces(self, sources: Iterable[Source], val_share: float) -> Iterator[Piece]:
        """Every document as pieces; its side is chosen by the hash of the first."""
        for source in sources:
            before = self.bytes_read
            try:
                for blocks in self._documents(source):
                    yield from _pieces_of(blocks, source.side, val_share)
            except (OSError, EOFError, zlib.error) as error:
                raise DataError(f"{source.place}: cannot be read to its end ({error}); fetch it again") from None
            self.bytes_read = before + source.bytes

    def _documents(self, source: Source) -> Iterator[Iterable[str]]:
        """Each document as an iterable of strings, to be read to its end before the next is asked for."""
        if source.kind == "txt":
            if not self._left_out(source):
                yield self._text_blocks(source)
            return
        read = {"parquet": self._parquet_rows, "hf": self._hub_rows}.get(source.kind, self._jsonl_lines)
        for number, (text, problem) in enumerate(read(source), 1):
            if isinstance(text, str):
                yield [text]
            elif text is not None:
                with text:
                    yield _blocks_of(text)
            elif problem is not None and self.skip_bad:
                self.skipped += 1
            elif problem is not None:
                unit = "line" if source.kind.startswith("jsonl") else "row"
                raise DataError(f"{source.place}, {unit} {number:,}: {problem}; {CURE}")

    def _left_out(self, source: Source) -> bool:
        """Whether a text is to be skipped. It must be known before its first part is handed on, so it is read twice."""
        if not self.skip_bad or source.path is None:
            return False
        try:
            for _ in Reader(self.field)._text_blocks(source):  # another reader, so that its bytes do not count here
                pass
        except DataError:
            self.skipped += 1
            return True
        return False

    def _text_blocks(self, source: Source) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8")()
        line = source.first_line
        with _open(source) as file:
            for block in itertools.chain(_blocks(file, source.bytes if source.path else sys.maxsize), [b""]):
                try:
                    text = decoder.decode(block, final=not block)
                except UnicodeDecodeError as error:
                    line += error.object[: error.start].count(b"\n")
                    raise DataError(f"{source.place}, line {line:,}: {not_utf8(error)}; {CURE}") from None
                line += block.count(b"\n")
                self.bytes_read += len(block)
                yield text

    def _jsonl_lines(self, source: Source) -> Iterator[TextOrProblem | LongTextOrProblem]:
        with _open(source) as raw:
            lines: IO[bytes] = gzip.GzipFile(fileobj=raw) if source.kind == "jsonl.gz" else raw  # type: ignore[assignment]
            before = self.bytes_read
            while line := lines.readline(LONG_LINE_BYTES):
                if len(line) < LONG_LINE_BYTES:
                    yield parse_line(line, self.field)
                else:
                    blocks = _rest_of_line(lines, line)
                    yield spool_text(blocks, self.field)
                    deque(blocks, maxlen=0)  # what is left of a bad line
                if source.path is not None:
                    self.bytes_read = before + raw.tell()

    def _parquet_rows(self, source: Source) -> Iterator[TextOrProblem]:
        for value in itertools.chain.from_iterable(parquet_batches(source.path, self.field)):
            try:
                yield value.decode(), None
            except UnicodeDecodeError as error:
                yield None, not_utf8(error)
            except AttributeError:
                yield None, f"{self.field!r} is {type(value).__name__}, not text"

    def _hub_rows(self, source: Source) -> Iterator[TextOrProblem]:
        for row in hub_rows(source.name):
            if self.field not in row:
                raise DataError(f"{source.name}: no column {self.field!r}; there are {', '.join(row)}; see --field")
            text, problem = checked_text(row[self.field], self.field)
            self.bytes_read += len(text or "")
            yield text, problem


def _rest_of_line(lines: IO[bytes], block: bytes) -> Iterator[bytes]:
    """A line in blocks, the first of which has been read."""
    while block:
        yield block
        block = b"" if block.endswith(b"\n") else lines.readline(BLOCK_BYTES)


def _blocks_of(text: IO[str]) -> Iterator[str]:
    return iter(partial(text.read, PIECE_CHARS), "")


CURE = "mend it, or leave such records out with --skip-bad"


def _pieces_of(blocks: Iterable[str], side: Side | None, val_share: float) -> Iterator[Piece]:
    """One document's pieces."""
    for number, text in enumerate(cut_text(blocks)):
        encoded = text.encode()
        side = side or choose_side(encoded, val_share)
        yield Piece(text=encoded, opens=number == 0, side=side)


def cut_text(
    blocks: Iterable[str], piece_chars: int = PIECE_CHARS, longest_chars: int = LONGEST_PIECE_CHARS
) -> Iterator[str]:
    """The text in pieces of `piece_chars` characters or a little more, cut where words part, or else after
    `longest_chars`; at least one piece."""
    rest, searched = "", piece_chars
    for block in blocks:
        rest += block
        start = 0
        while len(rest) - start > piece_chars:
            limit = start + longest_chars
            cut = SAFE_CUT.search(rest, start + searched, limit + 2)
            if cut is None and len(rest) < limit + 2:
                searched = max(piece_chars, len(rest) - start - 3)  # a cut may begin in the last characters seen
                break
            end = limit if cut is None else cut.end()
            yield rest[start:end]
            start, searched = end, piece_chars
        rest = rest[start:]
    yield rest


def choose_side(text: bytes, val_share: float) -> Side:
    """Equal texts go to one side, on every machine and in every order of files."""
    return "val" if split_number(text) < val_share * 2**64 else "train"


def split_number(text: bytes) -> int:
    """The text's hash, below 2^64; those of the lowest numbers go to validation."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=8, person=b"split").digest(), "big")


def _open(source: Source) -> IO[bytes]:
    if source.path is None:
        return open(sys.stdin.fileno(), "rb", closefd=False)
    try:
        file = open(source.path, "rb")  # noqa: SIM115 (the caller closes it)
    except OSError as error:
        raise DataError(f"{source.path}: cannot be read ({error.strerror}); check the path") from None
    file.seek(source.start)
    return file
