"""Records of files and of the hub's datasets: the text of each, or what is wrong with it."""

import csv
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from paceline.core.errors import DataError, optional_module
from paceline.text.byte_streams import BAD_BYTES

HUB_PREFIX = "hf:"
ROWS_AT_ONCE = 1024
LONGEST_CSV_FIELD = 64 << 20  # a quotation mark without its partner takes all that follows for one field, up to this
NAMES_SHOWN = 10
FIELD_CURE = "choose one with --field"
TextOrProblem = tuple[str | None, str | None]  # the text of a record, or what is wrong with it; neither of a blank line
LongTextOrProblem = tuple[IO[str] | None, str | None]  # the same where the text is a file


def parse_line(line: bytes, field: str) -> TextOrProblem:
    if not line.strip():
        return None, None
    try:
        return text_of(json.loads(line.decode()), field)
    except UnicodeDecodeError as error:
        return None, not_utf8(error.object[error.start])
    except (ValueError, RecursionError) as error:
        return None, f"not JSON ({error})"


def checked_text(value: Any, field: str) -> TextOrProblem:
    if not isinstance(value, str):
        return None, f"field {field!r} is {type(value).__name__}, not text"
    if not is_encodable(value):
        return None, f"field {field!r} holds half a surrogate pair, which is not text"
    return value, None


def escaped_text(value: Any, field: str) -> TextOrProblem:
    """The same of one in which "surrogateescape" kept bytes."""
    text, problem = checked_text(value, field)
    if problem and isinstance(value, str):
        problem = bad_byte(value) or problem
    return text, problem


def text_of(record: Any, field: str, checked: Callable[[Any, str], TextOrProblem] = checked_text) -> TextOrProblem:
    is_there = isinstance(record, dict) and field in record
    return checked(record[field], field) if is_there else (None, no_field(field, record))


def no_field(field: str, record: Any) -> str:
    if not isinstance(record, dict) or not record:
        return f"no field {field!r}"
    names = [str(name)[:40] for name in record][:NAMES_SHOWN]
    return f"no field {field!r}; it has {', '.join(names)}{', …' * (len(record) > len(names))}, {FIELD_CURE}"


def is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate, written as an escape
        return False
    return True


def csv_rows(stream: IO[bytes], place: str, field: str) -> Iterator[TextOrProblem]:
    """Rows of a table whose first line names its columns, parted by commas, semicolons or tabs."""
    lines = io.TextIOWrapper(stream, "utf-8", errors="surrogateescape", newline="")
    csv.field_size_limit(LONGEST_CSV_FIELD)
    first = lines.readline(LONGEST_CSV_FIELD).lstrip("\ufeff")
    tables = {mark: next(csv.reader([first], delimiter=mark), []) for mark in ",;\t"}
    mark = next((mark for mark, names in tables.items() if field in names), None)
    if mark is None:
        names = max(tables.values(), key=len)
        raise DataError(f"{place}: no column {field!r}; it has {', '.join(names)}, {FIELD_CURE}")
    column, rows = tables[mark].index(field), csv.reader(lines, delimiter=mark)
    try:
        for row in filter(None, rows):
            yield escaped_text(row[column] if column < len(row) else None, field)
    except csv.Error as error:
        raise DataError(f"{place}, line {rows.line_num + 2:,}: not CSV ({error}); mend it") from None


def column_values(path: Path, kind: str, field: str) -> Iterator[Any]:
    """Of a .parquet, or an Arrow file or stream. Texts as bytes: pyarrow does not look whether strings are UTF-8."""
    missing = DataError(f"{path}: reading .parquet and .arrow needs pyarrow; pip install 'paceline[data]'")
    pyarrow, parquet = (optional_module(name, missing) for name in ("pyarrow", "pyarrow.parquet"))
    try:
        with (pyarrow.OSFile if kind == "parquet" else pyarrow.memory_map)(str(path)) as source:
            if kind == "parquet":
                file = parquet.ParquetFile(source)
                names, batches = file.schema_arrow.names, file.iter_batches(ROWS_AT_ONCE, columns=[field])
            elif source.read(6) == b"ARROW1":
                file = pyarrow.ipc.open_file(source)
                names, batches = file.schema.names, map(file.get_batch, range(file.num_record_batches))
            else:
                source.seek(0)
                batches = pyarrow.ipc.open_stream(source)
                names = batches.schema.names
            if field not in names:
                raise DataError(f"{path}: no column {field!r}; it has {', '.join(names)}, {FIELD_CURE}")
            for batch in batches:
                column = batch.column(batch.schema.names.index(field))
                for start in range(0, len(column), ROWS_AT_ONCE):
                    yield from _values(pyarrow, column.slice(start, ROWS_AT_ONCE))
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{path}: not a readable {path.suffix} file ({error}); fetch it again") from None


def _values(pyarrow: Any, column: Any) -> list[Any]:
    kinds = pyarrow.types
    if kinds.is_dictionary(column.type):
        column = column.dictionary_decode()
    is_text = any(is_kind(column.type) for is_kind in (kinds.is_string, kinds.is_large_string, kinds.is_string_view))
    values: list[Any] = (column.cast(pyarrow.large_binary()) if is_text else column).to_pylist()
    return values


def parse_stream(given: str) -> tuple[str, str | None, str]:
    name, *rest = given.removeprefix(HUB_PREFIX).split(":")
    if not name or len(rest) > 2 or not all(rest):
        raise DataError(f"{given}: not a dataset; write hf:NAME, hf:NAME:CONFIG or hf:NAME:CONFIG:SPLIT")
    config, split = [*rest, None, None][:2]
    return name, config, split or "train"


def hub_rows(given: str) -> Iterator[dict[str, Any]]:
    """Every row of a dataset, in its order. Whatever the network does is one line that names the dataset."""
    name, config, split = parse_stream(given)
    missing = DataError(f"{given}: streaming needs the package datasets; pip install datasets")
    datasets = optional_module("datasets", missing)
    try:
        yield from datasets.load_dataset(name, config, split=split, streaming=True)
    except Exception as error:  # of datasets, fsspec or one of three HTTP libraries
        said = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        cure = "check name and network, then run the same command again to continue"
        raise DataError(f"{given}: cannot be read to its end ({said}); {cure}") from error


def bad_byte(text: str) -> str | None:
    found = BAD_BYTES.search(text)
    return not_utf8(ord(found.group()[0]) - 0xDC00) if found else None


def not_utf8(byte: int) -> str:
    return f"byte {byte:#04x} is not UTF-8"
