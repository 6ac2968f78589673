"""Records of files and of the hub's datasets: the text of each, or what is wrong with it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from paceline.core.errors import DataError

HUB_PREFIX = "hf:"
PARQUET_ROWS = 1024
TextOrProblem = tuple[str | None, str | None]
"""The text of a record, or what is wrong with it; neither of a blank line."""
LongTextOrProblem = tuple[IO[str] | None, str | None]
"""The same where the text is a file."""


def parse_line(line: bytes, field: str) -> TextOrProblem:
    if not line.strip():
        return None, None
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError as error:
        return None, not_utf8(error)
    except (ValueError, RecursionError) as error:
        return None, f"not JSON ({error})"
    if not isinstance(record, dict) or field not in record:
        return None, f"no field {field!r}"
    return checked_text(record[field], field)


def checked_text(value: Any, field: str) -> TextOrProblem:
    """A field's value."""
    if not isinstance(value, str):
        return None, f"field {field!r} is {type(value).__name__}, not text"
    if not is_encodable(value):
        return None, f"field {field!r} holds half a surrogate pair, which is not text"
    return value, None


def is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate, written as an escape
        return False
    return True


def parquet_batches(path: Path | None, field: str) -> Iterator[list[Any]]:
    """The column as lists of bytes, because pyarrow does not look whether its strings are UTF-8."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError(f"{path}: reading .parquet needs pyarrow; pip install 'paceline[data]'") from None
    kinds = pyarrow.types
    text_kinds = (kinds.is_string, kinds.is_large_string, kinds.is_string_view)
    try:
        file = pyarrow.parquet.ParquetFile(path)
        if field not in file.schema_arrow.names:
            names = ", ".join(file.schema_arrow.names)
            raise DataError(f"{path}: no column {field!r}; it has {names}, choose one with --field")
        for batch in file.iter_batches(batch_size=PARQUET_ROWS, columns=[field]):
            column = batch.column(0)
            if pyarrow.types.is_dictionary(column.type):
                column = column.dictionary_decode()
            is_text = any(is_kind(column.type) for is_kind in text_kinds)
            yield (column.cast(pyarrow.large_binary()) if is_text else column).to_pylist()
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{path}: not a readable .parquet file ({error}); fetch it again") from None


def parse_stream(given: str) -> tuple[str, str | None, str]:
    """Name, config and split."""
    name, *rest = given.removeprefix(HUB_PREFIX).split(":")
    if not name or len(rest) > 2 or not all(rest):
        raise DataError(f"{given}: not a dataset; write hf:NAME, hf:NAME:CONFIG or hf:NAME:CONFIG:SPLIT")
    config, split = [*rest, None, None][:2]
    return name, config, split or "train"


def hub_rows(given: str) -> Iterator[dict[str, Any]]:
    """Every row of a dataset, in its order. Whatever the network does is one line that names the dataset."""
    name, config, split = parse_stream(given)
    try:
        import datasets
    except ImportError:
        raise DataError(f"{given}: streaming needs the package datasets; pip install datasets") from None
    try:
        yield from datasets.load_dataset(name, config, split=split, streaming=True)
    except Exception as error:  # of datasets, fsspec or one of three HTTP libraries
        said = (str(error).splitlines() or [""])[0]
        raise DataError(
            f"{given}: cannot be read to its end ({type(error).__name__}: {said}); check name and network, then run "
            f"the same command again to continue"
        ) from error


def not_utf8(error: UnicodeDecodeError) -> str:
    return f"byte {error.object[error.start]:#04x} is not UTF-8"
