"""Datasets as streams: the same shards as from a file, and one line for what fails."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from paceline.core.errors import DataError
from paceline.text.config import PrepareConfig
from paceline.text.manifest import DatasetManifest
from paceline.text.prepare import prepare
from paceline.text.records import parse_stream
from text.test_prepare import some_texts
from text.test_sources import write_jsonl

TEXTS = some_texts(40)
NAME = "hf:somebody/books:small"


class Datasets(ModuleType):
    """Stands in for the package: one dataset, whose stream may break."""

    def __init__(self, rows: list[dict[str, Any]], *, breaks_after: int | None = None) -> None:
        super().__init__("datasets")
        self.rows, self.breaks_after = rows, breaks_after
        self.asked: list[tuple[Any, ...]] = []

    def load_dataset(self, name: str, config: str | None, *, split: str, streaming: bool) -> Iterator[dict[str, Any]]:
        self.asked.append((name, config, split, streaming))
        for number, row in enumerate(self.rows):
            if number == self.breaks_after:
                raise ConnectionError("reset by peer\nmore about it")
            yield row


@pytest.fixture
def datasets(monkeypatch: pytest.MonkeyPatch) -> Datasets:
    module = Datasets([{"id": number, "text": text} for number, text in enumerate(TEXTS)])
    monkeypatch.setitem(sys.modules, "datasets", module)
    return module


def prepared(out: Path, given: str, **changes: Any) -> DatasetManifest:
    options: dict[str, Any] = {"tokenizer": "bytes", "shard_tokens": 5_000, "val_share": 0.1, "workers": 1}
    return prepare(PrepareConfig(inputs=(given,), out=str(out), **(options | changes)))


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe-300"])
def test_a_stream_gives_the_shards_of_a_file_with_its_rows(tokenizer: str, datasets: Datasets, tmp_path: Path) -> None:
    streamed = prepared(tmp_path / "streamed", NAME, tokenizer=tokenizer)
    file = write_jsonl(tmp_path / "in.jsonl", TEXTS)
    assert prepared(tmp_path / "read", str(file), tokenizer=tokenizer).shards == streamed.shards
    assert datasets.asked[0] == ("somebody/books", "small", "train", True)


def test_a_stream_that_breaks_is_one_line_and_is_continued(datasets: Datasets, tmp_path: Path) -> None:
    whole = prepared(tmp_path / "whole", NAME)
    datasets.breaks_after = 30
    with pytest.raises(DataError, match=r"somebody/books:small: cannot be read.*reset by peer\); check") as caught:
        prepared(tmp_path / "broken", NAME)
    assert "\n" not in str(caught.value)
    datasets.breaks_after = None
    assert prepared(tmp_path / "broken", NAME).shards == whole.shards


@pytest.mark.parametrize(
    ("row", "said"),
    [({"id": 3}, "no column 'text'; there are id"), ({"text": None}, "row 41: field 'text' is NoneType")],
)
def test_a_bad_row_is_named(row: dict[str, Any], said: str, datasets: Datasets, tmp_path: Path) -> None:
    datasets.rows.append(row)
    with pytest.raises(DataError, match=said):
        prepared(tmp_path / "out", NAME)


def test_bad_rows_may_be_left_out(datasets: Datasets, tmp_path: Path) -> None:
    datasets.rows.insert(3, {"text": None})
    assert prepared(tmp_path / "out", NAME, skip_bad=True).skipped == 1


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ("hf:a/b", ("a/b", None, "train")),
        ("hf:a/b:c", ("a/b", "c", "train")),
        ("hf:a/b:c:test", ("a/b", "c", "test")),
    ],
)
def test_config_and_split_may_be_left_out(given: str, parts: tuple[str, str | None, str]) -> None:
    assert parse_stream(given) == parts


@pytest.mark.parametrize("given", ["hf:", "hf::c", "hf:a::test", "hf:a:b:c:d"])
def test_a_name_that_is_none_is_refused_before_anything_is_made(given: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="write hf:NAME"):
        prepared(tmp_path / "out", given)
    assert not (tmp_path / "out").exists()


def test_the_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match="pip install datasets"):
        prepared(tmp_path / "out", NAME)
