"""Input files to documents, and documents to pieces of bounded size.

Everything is read as a stream, so a document may be larger than memory. A long document is cut only where every
tokenizer here starts a new word whatever surrounds it, so that pieces can be encoded apart and joined. Rows of the hub
are not kept on the disk: a preparation that is continued reads those before its stopping place again.
"""

import codecs
import dataclasses
import itertools
import re
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Literal, NamedTuple

import numpy as np

from paceline.core.errors import DataError
from paceline.text import records, token_files
from paceline.text.byte_streams import BLOCK_BYTES, PACKINGS, as_utf8, blocks_of, read_errors, replace_bad, unpacked
from paceline.text.long_lines import json_records, spool_text
from paceline.text.manifest import FILE_NAME, TokenizerEntry, ValSplit
from paceline.text.records import LongTextOrProblem, TextOrProblem
from paceline.text.separator import split_documents
from paceline.text.split import SHORTEST_CUT_BYTES, Side, Sides, cut_in_line, hash_is_enough, split_number, wanted_bytes
from paceline.text.tokenizer import FILE_NAME as TOKENIZER_FILE

STANDARD_INPUT = "-"
KINDS = {
    ".txt": "txt", ".md": "txt", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".csv": "csv", ".tsv": "csv",
    ".parquet": "parquet", ".arrow": "arrow",
}  # fmt: skip
UNPACKABLE = ("parquet", "arrow")  # kinds that are read with random access, so that they cannot be packed
TABLES = ("csv", "json")  # of a folder read only where there is no text of another kind, which these often describe
DATASET_DICT = "dataset_dict.json"  # beside the folders of splits
OLD_SUFFIXES = (".txt", ".md", ".jsonl", ".jsonl.gz", ".parquet")  # searched for before `DatasetManifest.split`
PIECE_CHARS = 1 << 20
LONGEST_PIECE_CHARS = 2 * PIECE_CHARS  # cut here in any case: a tokenizer needs 130 bytes for a character
LONG_LINE_BYTES = 4 << 20  # a line of JSON from this size on is not held in memory
CURE = ", or leave such records out with --skip-bad"
TEXT_CURE = "name its --encoding, or choose --on-bad-text replace or skip-line (the same as --skip-bad)"
LINE = re.compile(r"[^\n]*\n|[^\n]+")
SAFE_CUT = re.compile(r"\S(?= \S)|\S\n(?=\S)")
"""GPT-2's word rule starts a word at a lone space before text, and after a lone line break; the cut is the match's end.
What Python calls white space includes all that the tokenizers' regular expressions do."""

BadText = Literal["error", "replace", "skip-line", "skip-file"]  # skip-file: --skip-bad of older versions, of a .txt


@dataclass(frozen=True)
class Source:
    """A file, or a part of one. `path` None is standard input, or a stream of kind `hf`."""

    path: Path | None
    name: str
    kind: str
    bytes: int
    start: int = 0
    first_line: int = 1
    side: Side | None = None  # where its documents go; None: each by its hash
    packing: str = ""  # one of byte_streams.PACKINGS, or none
    dtype: str = ""  # of token ids, kind `ids`, which lie from `start` on

    @property
    def only_once(self) -> bool:
        return self.path is None and self.kind != "hf"

    @property
    def is_plain(self) -> bool:
        """Whether its size is that of its text."""
        return self.path is not None and not self.packing

    @property
    def place(self) -> str:
        return str(self.path or self.name)


class Piece(NamedTuple):
    """A document or a part of one. `opens`: it begins a document."""

    text: bytes
    opens: bool
    side: Side
    is_ids: bool = False  # token ids, uint16, with the end-of-text tokens of all documents but the first


def find_sources(inputs: Sequence[str], stdin_format: str, *, ids: bool = False, old: bool = False) -> list[Source]:
    """Every file the inputs name, folders in sorted order. `ids`: of token ids, else text; `old`: as older versions."""
    sources: list[Source] = []
    for given in inputs:
        if given == STANDARD_INPUT:
            kind = "txt" if stdin_format == "text" else "jsonl"
            sources.append(Source(path=None, name="standard input", kind=kind, bytes=0))
        elif given.startswith(records.HUB_PREFIX):
            records.parse_stream(given)
            sources.append(Source(path=None, name=given, kind="hf", bytes=0))
        elif Path(given).is_dir():
            sources += _search_folder(Path(given), ids=ids, old=old)
        else:
            sources.append(_file_source(Path(given), Path(given).name, ids=ids))
    if ids and any(source.kind != "ids" for source in sources):
        raise DataError("--ids-of: standard input and datasets of the hub are text; name .bin or .npy files")
    return sources


def _search_folder(folder: Path, *, ids: bool, old: bool) -> list[Source]:
    paths = _files_of(folder)
    if ids or old:
        chosen = [path for path in paths if path.name.endswith(token_files.SUFFIXES if ids else OLD_SUFFIXES)]
    else:
        kinds = {path: kind[0] for path in paths if (kind := kind_of(path)) and not _is_test_split(path, folder)}
        chosen = [path for path, kind in kinds.items() if kind not in TABLES] or list(kinds)
    if not chosen:
        hints = (how for path in paths if not ids and (how := token_files.how_to_convert(path, named=folder)))
        how = next(hints, "name the folder that holds it")
        if (folder / FILE_NAME).exists():
            how = f"it holds prepared data, to train on with --data.dir {folder}"
        raise DataError(f"{folder}: no {', '.join(token_files.SUFFIXES if ids else KINDS)} files there; {how}")
    found = [_file_source(path, path.relative_to(folder).as_posix(), ids=ids) for path in chosen]
    return sorted(found, key=lambda source: source.name)


def _is_test_split(path: Path, folder: Path) -> bool:
    """Whether the file is of the split `test` of a DatasetDict that `save_to_disk` wrote into the folder."""
    parents = (folder / part for part in path.relative_to(folder).parents)
    return any(part.name == "test" and part != folder and (part.parent / DATASET_DICT).exists() for part in parents)


def _files_of(folder: Path) -> list[Path]:
    """Every file below the folder, but for what `data prepare` wrote."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    manifests = {path.parent for path in paths if path.name == FILE_NAME}
    written = manifests & {path.parent for path in paths if path.name == TOKENIZER_FILE}
    return [path for path in paths if path.parent not in written or path.suffix not in (".bin", ".json")]


def files_left_aside(inputs: Sequence[str], sources: list[Source]) -> list[str]:
    """Names of files in the input folders that are not among the sources. Hidden ones do not count."""
    read = {source.path for source in sources}
    folders = [Path(given) for given in inputs if Path(given).is_dir()]
    others = (path.relative_to(folder) for folder in folders for path in _files_of(folder) if path not in read)
    return sorted(path.as_posix() for path in others if not any(part.startswith(".") for part in path.parts))


def _file_source(path: Path, name: str, *, ids: bool) -> Source:
    if not path.exists():
        raise DataError(f"{path}: does not exist; name a file, a folder, or - for standard input")
    found = kind_of(path)
    if ids and path.suffix in token_files.SUFFIXES:
        layout = token_files.layout_of(path)
        side: Side = "val" if token_files.is_validation(name) else "train"
        return Source(path=path, name=name, kind="ids", side=side, **layout._asdict())
    if found is None or ids:
        how = None if ids and path.suffix not in token_files.PICKLES else token_files.how_to_convert(path, named=path)
        wanted = ", ".join(token_files.SUFFIXES if ids else (*KINDS, f"or these packed ({' '.join(PACKINGS)})"))
        raise DataError(f"{path}: {how or f'not a kind of file that can be read; use {wanted}'}")
    return Source(path=path, name=name, kind=found[0], packing=found[1], bytes=path.stat().st_size)


def kind_of(path: Path) -> tuple[str, str] | None:
    name = path.name.lower()
    packing = next((suffix for suffix in PACKINGS if name.endswith(suffix)), "")
    kind = next((kind for suffix, kind in KINDS.items() if name.removesuffix(packing).endswith(suffix)), None)
    return None if kind is None or (packing and kind in UNPACKABLE) else (kind, packing)


def cut_ids(sources: list[Source], val_share: float) -> list[Source]:
    """If no file of ids is called one of validation, the end of the last becomes it, at most half."""
    if val_share == 0 or any(source.side == "val" for source in sources):
        return sources
    last = sources[-1]
    width, total = np.dtype(last.dtype).itemsize, sum(s.bytes // np.dtype(s.dtype).itemsize for s in sources)
    size = min(int(total * val_share), last.bytes // width // 2) * width
    cut = last.bytes - size
    train, val = replace(last, bytes=cut), replace(last, start=last.start + cut, bytes=size, side="val")
    return [*sources[:-1], train, *([val] if size else [])]


def cut_lone_text(sources: list[Source], val_share: float, *, old: bool = False) -> list[Source]:
    """If a single .txt or .md is all there is, its end becomes the validation document, else nothing would; after a
    line or, in a long line, where `cut_in_line` finds a place. `old`: as older versions did."""
    if len(sources) != 1 or sources[0].kind != "txt" or not sources[0].is_plain or val_share == 0:
        return sources
    whole = sources[0]
    is_short = old or whole.bytes < SHORTEST_CUT_BYTES
    start = int(whole.bytes * (1 - val_share)) if is_short else whole.bytes - wanted_bytes(whole.bytes, val_share)
    with _open(whole) as file:
        file.seek(start)
        line = file.readline()
        cut = file.tell()
        if cut - start > (whole.bytes - start) // 4 and start > 0 and (cut == whole.bytes or not old):
            cut = start + cut_in_line(line)
        file.seek(0)
        lines = sum(block.count(b"\n") for block in blocks_of(file, cut))
    train = replace(whole, bytes=cut, side="train")
    val = replace(whole, bytes=whole.bytes - cut, start=cut, first_line=lines + 1, side="val")
    return [train, val] if cut < whole.bytes else [train]


@dataclass
class Losses:
    records: int = 0
    lines: int = 0
    line_bytes: int = 0
    replaced_bytes: int = 0
    first: str = ""  # where the first was, and what was wrong


@dataclass
class Reader:
    """Reads sources, stops at bad text, or leaves it out and counts it, and knows how far it has come."""

    field: str
    _: KW_ONLY
    bad: BadText = "error"
    encoding: str = "utf-8"
    separator: re.Pattern[str] | None = None
    tokenizer: TokenizerEntry | None = None  # of token ids, if those are the input
    lost: Losses = dataclasses.field(default_factory=Losses)
    bytes_before: int = 0  # of sources that have been read
    place: Callable[[], int] = lambda: 0  # in the one that is being read

    @property
    def bytes_read(self) -> int:
        """Of the input files, for the progress bar."""
        return self.bytes_before + self.place()

    def pieces(self, sources: Iterable[Source], split: ValSplit) -> Generator[Piece]:
        """Every document as pieces; its side is chosen by the hash of the first."""
        if self.tokenizer is not None:
            yield from self._id_pieces(list(sources), self.tokenizer)
            return
        for source in sources:
            with self._reading(source):
                keep_blank = source.kind != "txt" or (self.separator is None and self.bad != "skip-line")
                for blocks in self._documents(source):
                    yield from _pieces_of(blocks, Sides(split, source.side), keep_blank=keep_blank)

    def documents(self, sources: Sequence[Source]) -> Iterator[tuple[int, int]]:
        """Number and bytes of each document, those that need not be read for it first."""
        split = ValSplit(share=0.0)
        for source in filter(self._size_is_known, sources):
            with closing(self.pieces([source], split)) as pieces:
                if first := next(pieces, None):
                    yield split_number(first.text), source.bytes
        number = size = 0
        for piece in self.pieces(itertools.filterfalse(self._size_is_known, sources), split):
            if piece.opens:
                yield number, size
                number, size = split_number(piece.text), 0
            size += len(piece.text)
        yield number, size

    def hash_is_enough(self, sources: Sequence[Source], share: float) -> bool:
        """Whether the hash alone gives `share`, as the lengths of lines tell, ten times as fast as their texts."""
        if not all(source.kind == "jsonl" and source.is_plain for source in sources):
            return False
        totals, squares = zip(*map(_line_sums, sources), strict=True)
        return hash_is_enough(sum(totals), sum(squares), share)

    def _size_is_known(self, source: Source) -> bool:
        unchanged = self.bad == "error" and self.encoding == "utf-8" and self.separator is None
        return unchanged and source.kind == "txt" and source.is_plain

    @contextmanager
    def _reading(self, source: Source) -> Iterator[None]:
        try:
            yield
        except read_errors() as error:
            raise DataError(f"{source.place}: cannot be read to its end ({error}); fetch it again") from None
        self.bytes_before, self.place = self.bytes_before + source.bytes, lambda: 0

    def _documents(self, source: Source) -> Iterator[Iterable[str]]:
        """Each document as an iterable of strings, to be read to its end before the next is asked for."""
        if source.kind == "txt":
            if self.bad != "skip-file" or self._is_good(source):
                blocks = self._text_blocks(source)
                yield from [blocks] if self.separator is None else split_documents(blocks, self.separator)
            return
        unit = {"jsonl": "line", "json": "record"}.get(source.kind, "row")
        for number, (text, problem) in enumerate(self._records(source), 1):
            if isinstance(text, str):
                yield [text]
            elif text is not None:
                with text:
                    yield iter(partial(text.read, PIECE_CHARS), "")
            elif problem is not None:
                self._leave_out(f"{source.place}, {unit} {number:,}: {problem}")
                self.lost.records += 1

    def _leave_out(self, problem: str) -> None:
        """Raise, or note what is wrong."""
        is_encoding = problem.endswith("is not UTF-8")
        if is_encoding and self.encoding != "utf-8":
            problem = f"{problem[: problem.rindex(': byte ')]}: not {self.encoding}"
        if self.bad in ("error", "replace"):
            mend = "" if problem.endswith(records.FIELD_CURE) else "; mend it"
            raise DataError(f"{problem}; {TEXT_CURE}" if is_encoding else f"{problem}{mend}{CURE}")
        self.lost.first = self.lost.first or problem

    def _is_good(self, source: Source) -> bool:
        """Whether all of a text can be read. It must be known before its first part is handed on: it is read twice."""
        try:
            for _ in Reader(self.field)._text_blocks(source) if source.path else ():
                pass
        except DataError as error:
            self._leave_out(str(error))
            self.lost.records += 1
            return False
        return True

    @contextmanager
    def _content(self, source: Source) -> Iterator[IO[bytes]]:
        """A file unpacked and in UTF-8."""
        with _open(source) as raw:
            if source.path is not None:
                self.place = lambda: raw.tell() - source.start
            stream = unpacked(raw, source.packing, source.place)
            try:
                yield as_utf8(stream, self.encoding, self._count_replaced if self.bad == "replace" else None)
            finally:
                end = 0 if raw.closed else self.place()  # the reader of CSV has closed it
                self.place = lambda: end

    def _count_replaced(self, count: int) -> None:
        self.lost.replaced_bytes += count

    def _text_blocks(self, source: Source) -> Iterator[str]:
        by_line = self.bad == "skip-line"
        decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape" if by_line else "strict")
        line, rest = source.first_line, ""
        with self._content(source) as content:
            as_it_is = not source.packing and self.encoding == "utf-8" and self.bad != "replace"
            length = source.bytes if source.side is not None or (source.path and as_it_is) else sys.maxsize
            for block in itertools.chain(blocks_of(content, length), [b""]):
                try:
                    text = decoder.decode(block, final=not block)
                except UnicodeDecodeError as error:
                    line += error.object[: error.start].count(b"\n")
                    self._leave_out(f"{source.place}, line {line:,}: {records.not_utf8(error.object[error.start])}")
                    raise
                line += block.count(b"\n")
                if by_line:
                    text, rest = _whole_lines(rest + text, is_last=not block)
                    text = self._good_lines(text, source)
                yield text

    def _good_lines(self, text: str, source: Source) -> str:
        if records.is_encodable(text):
            return text
        kept = []
        for line in LINE.findall(text):
            if problem := records.bad_byte(line):
                self._leave_out(f"{source.place}: {problem}")
                self.lost.lines += 1
                self.lost.line_bytes += len(line.encode("utf-8", "surrogateescape"))
            else:
                kept.append(line)
        return "".join(kept)

    def _records(self, source: Source) -> Iterator[TextOrProblem | LongTextOrProblem]:
        if source.kind == "hf":
            for row in records.hub_rows(source.name):
                if self.field not in row:
                    raise DataError(f"{source.name}: no column {self.field!r}; there are {', '.join(row)}; see --field")
                text, problem = records.checked_text(row[self.field], self.field)
                self.bytes_before += len(text or "")
                yield text, problem
        elif source.kind in UNPACKABLE:
            yield from self._columns(source)
        else:
            with self._content(source) as content:
                yield from RECORDS_OF[source.kind](content, source.place, self.field)

    def _columns(self, source: Source) -> Iterator[TextOrProblem]:
        assert source.path is not None
        for value in records.column_values(source.path, source.kind, self.field):
            text = value.decode(errors="surrogateescape") if isinstance(value, bytes) else value
            if self.bad == "replace" and isinstance(text, str):
                text = replace_bad(text, self._count_replaced)
            yield records.escaped_text(text, self.field)

    def _id_pieces(self, sources: Sequence[Source], tokenizer: TokenizerEntry) -> Iterator[Piece]:
        """Ids, side by side. Documents that end-of-text closes, as nanoGPT's, become ones that it opens."""
        sides: tuple[Side, ...] = ("train", "val")
        for side in sides:
            here = [source for source in sources if source.side == side]
            blocks = itertools.chain.from_iterable(self._id_blocks(source, tokenizer) for source in here)
            first, closes = True, False
            for ids, following in itertools.pairwise(itertools.chain(blocks, [None])):
                assert ids is not None
                opens = first and ids[0] != tokenizer.end_of_text
                first, closes = False, closes or opens
                if closes and following is None and ids[-1] == tokenizer.end_of_text:
                    ids = ids[:-1]
                yield Piece(text=ids.tobytes(), opens=bool(opens), side=side, is_ids=True)

    def _id_blocks(self, source: Source, tokenizer: TokenizerEntry) -> Iterator[np.ndarray]:
        assert source.path is not None
        with self._reading(source):
            layout = token_files.Layout(source.start, source.bytes, source.dtype)
            yield from token_files.id_blocks(source.path, layout, tokenizer)


def _pieces_of(blocks: Iterable[str], sides: Sides, *, keep_blank: bool) -> Iterator[Piece]:
    """One document's pieces. What is blank between separators, or after bad lines were left out, is none."""
    opened = set[Side]()
    for text in cut_text(blocks):
        if keep_blank or opened or text.strip():
            for chosen, part in sides.of(text.encode()):
                yield Piece(text=part, opens=chosen not in opened, side=chosen)
                opened.add(chosen)


def _jsonl_lines(lines: IO[bytes], place: str, field: str) -> Iterator[TextOrProblem | LongTextOrProblem]:
    while line := lines.readline(LONG_LINE_BYTES):
        if len(line) < LONG_LINE_BYTES:
            yield records.parse_line(line, field)
        else:
            blocks = _rest_of_line(lines, line)
            yield spool_text(blocks, field)
            deque(blocks, maxlen=0)  # what is left of a bad line


def _json_records(file: IO[bytes], place: str, field: str) -> Iterator[TextOrProblem | LongTextOrProblem]:
    try:
        yield from json_records(blocks_of(file), field)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: not JSON ({error}); mend it, since what follows has no known beginning") from None


RecordsOf = Callable[[IO[bytes], str, str], Iterator[TextOrProblem | LongTextOrProblem]]
RECORDS_OF: dict[str, RecordsOf] = {"json": _json_records, "csv": records.csv_rows, "jsonl": _jsonl_lines}


def _line_sums(source: Source) -> tuple[int, float]:
    """Of the lengths of its lines and of their squares."""
    last, place, squares = 0, 0, 0.0
    with _open(source) as file:
        for block in blocks_of(file):
            ends = place + 1 + np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n"))
            squares += float(np.square(np.diff(ends, prepend=last), dtype=np.float64).sum())
            last, place = int(ends[-1]) if len(ends) else last, place + len(block)
    return place, squares + float(place - last) ** 2


def _whole_lines(text: str, *, is_last: bool) -> tuple[str, str]:
    """The lines that have ended, and the rest; a line too long to be held counts as several."""
    end = text.rfind("\n") + 1
    if is_last or (end == 0 and len(text) >= LONG_LINE_BYTES):
        end = len(text)
    return text[:end], text[end:]


def _rest_of_line(lines: IO[bytes], block: bytes) -> Iterator[bytes]:
    """A line in blocks, the first of which has been read."""
    while block:
        yield block
        block = b"" if block.endswith(b"\n") else lines.readline(BLOCK_BYTES)


def cut_text(
    blocks: Iterable[str], piece_chars: int = PIECE_CHARS, longest_chars: int = LONGEST_PIECE_CHARS
) -> Iterator[str]:
    """Pieces of `piece_chars` characters or a little more, cut where words part or at `longest_chars`; one at least."""
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


def _open(source: Source) -> IO[bytes]:
    if source.path is None:
        return open(sys.stdin.fileno(), "rb", closefd=False)
    try:
        file = open(source.path, "rb")  # noqa: SIM115 (the caller closes it)
    except OSError as error:
        raise DataError(f"{source.path}: cannot be read ({error.strerror}); check the path") from None
    file.seek(source.start)
    return file
