"""Datasets of the Hugging Face hub as a stream of rows, through the package `datasets`, if it is there.

An input is written `hf:NAME`, `hf:NAME:CONFIG` or `hf:NAME:CONFIG:SPLIT`; the split is `train` unless it is named.
Nothing is kept on the disk, so a preparation that is continued reads the rows before its stopping place again; for all
of a large dataset `data download` is the better way.
"""

from collections.abc import Iterator
from typing import Any

from paceline.core.errors import DataError

PREFIX = "hf:"
DEFAULT_SPLIT = "train"


def is_stream(given: str) -> bool:
    return given.startswith(PREFIX)


def parse_stream(given: str) -> tuple[str, str | None, str]:
    """Name, config and split."""
    name, *rest = given.removeprefix(PREFIX).split(":")
    if not name or len(rest) > 2 or not all(rest):
        raise DataError(f"{given}: not a dataset; write hf:NAME, hf:NAME:CONFIG or hf:NAME:CONFIG:SPLIT")
    config, split = [*rest, None, None][:2]
    return name, config, split or DEFAULT_SPLIT


def rows(given: str) -> Iterator[dict[str, Any]]:
    """Every row of the dataset, in its order. Whatever the network does is one line that names the dataset."""
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
