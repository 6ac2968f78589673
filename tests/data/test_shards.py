"""A file is a shard or it is refused by name and place; nothing in between."""

import struct
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from paceline.core.errors import DataError
from paceline.core.files import blake2b_of
from paceline.data.shards import HEADER_BYTES, MAGIC, Shard, check_vocabulary, manifest_path, open_shard, positions_of
from paceline.text.shard_writer import write_shard


def header(magic: int = MAGIC, version: int = 1, count: int = 3) -> bytes:
    return struct.pack("<3i", magic, version, count).ljust(HEADER_BYTES, b"\0")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "x_train_000001.bin"


def test_written_tokens_come_back_with_their_manifest(path: Path) -> None:
    tokens = np.array([0, 7, 65_534, 0, 1], dtype=np.uint16)
    written = write_shard(path, tokens, documents=2, tokenizer="abc")
    shard = open_shard(path)
    assert shard.tokens.tolist() == tokens.tolist()
    assert shard.manifest == written
    assert (written.tokens, written.documents, written.max_token) == (5, 2, 65_534)
    assert written.blake2b == blake2b_of(path)


def test_the_layout_is_llm_c_s(path: Path) -> None:
    write_shard(path, np.array([258, 3], dtype=np.uint16), documents=0, tokenizer="")
    assert path.read_bytes() == header(count=2) + b"\x02\x01\x03\x00"


def test_a_shard_without_manifest_is_read(path: Path) -> None:
    path.write_bytes(header(count=2) + b"\x02\x01\x03\x00")
    shard = open_shard(path)
    assert shard.tokens.tolist() == [258, 3]
    assert shard.manifest is None


def test_the_mapping_is_read_only(path: Path) -> None:
    write_shard(path, np.arange(4, dtype=np.uint16), documents=0, tokenizer="")
    with pytest.raises(ValueError, match="read-only"):
        open_shard(path).tokens[0] = 1


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "truncated"),
        (header()[:500], "truncated"),
        (header(magic=1) + bytes(6), "word 0 is 1"),
        (header(version=2) + bytes(6), "word 1 is 2"),
        (header(count=0), "empty shard"),
        (header(count=-5), "empty shard"),
        (header() + bytes(5), "truncated"),
        (header() + bytes(7), "too long"),
        (header(count=2**31 - 1) + bytes(6), "truncated"),  # would be 4 GB: refused before anything is mapped
    ],
)
def test_a_bad_file_is_refused_by_name(path: Path, content: bytes, reason: str) -> None:
    path.write_bytes(content)
    with pytest.raises(DataError, match=reason) as caught:
        open_shard(path)
    assert str(path) in str(caught.value)


def test_missing_files_and_folders_are_refused(tmp_path: Path) -> None:
    for missing in (tmp_path / "none.bin", tmp_path):
        with pytest.raises(DataError, match="cannot be read"):
            open_shard(missing)


@given(content=st.binary(max_size=3000) | st.binary(max_size=64).map(lambda tail: header(count=len(tail) // 2) + tail))
@example(content=header() + bytes(6))
def test_any_bytes_are_a_shard_or_a_data_error(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "any.bin"
        path.write_bytes(content)
        try:
            tokens = open_shard(path).tokens.tobytes()
        except DataError:
            return
        assert tokens == content[HEADER_BYTES:] != b""


@pytest.mark.parametrize(
    ("manifest", "reason"),
    [
        ('{"tokens": 4, "documents": 0, "max_token": 3, "tokenizer": "", "blake2b": ""}', "header counts 3"),
        ('{"tokens": 3', "not valid JSON"),
        ('{"tokens": "3"}', "expected int"),
        ("[]", "expected an object"),
        ('{"tokens": 3}', "missing"),
    ],
)
def test_a_manifest_that_disagrees_is_refused(path: Path, manifest: str, reason: str) -> None:
    path.write_bytes(header() + bytes(6))
    manifest_path(path).write_text(manifest)
    with pytest.raises(DataError, match=reason) as caught:
        open_shard(path)
    assert str(path) in str(caught.value)


def test_rewriting_a_shard_never_leaves_the_old_manifest_beside_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_shard(path, np.arange(4, dtype=np.uint16), documents=0, tokenizer="")

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("paceline.text.shard_writer.write_json", fail)
    with pytest.raises(OSError, match="disk full"):
        write_shard(path, np.arange(5, dtype=np.uint16), documents=0, tokenizer="")
    assert open_shard(path).manifest is None


def test_empty_shards_are_not_written(path: Path) -> None:
    with pytest.raises(DataError, match="not 0"):
        write_shard(path, np.array([], dtype=np.uint16), documents=0, tokenizer="")
    assert not path.exists()


@pytest.mark.parametrize("with_manifest", [True, False])
@pytest.mark.parametrize("place", [0, 2**22 - 1, 2**22, 2**22 + 4])  # around the edge of one scan
def test_a_token_past_the_vocabulary_is_named_by_file_and_place(path: Path, with_manifest: bool, place: int) -> None:
    tokens = np.zeros(2**22 + 5, dtype=np.uint16)
    tokens[place] = 300
    write_shard(path, tokens, documents=0, tokenizer="")
    if not with_manifest:
        manifest_path(path).unlink()
    shard = open_shard(path)
    check_vocabulary(shard, 301)
    with pytest.raises(DataError, match=f"token {place:,} has id 300") as caught:
        check_vocabulary(shard, 300)
    assert str(path) in str(caught.value)


def test_positions_are_found_across_scan_edges(path: Path) -> None:
    places = [0, 5, 2**22 - 1, 2**22, 2**22 + 7]
    tokens = np.ones(2**22 + 8, dtype=np.uint16)
    tokens[places] = 0
    assert positions_of(Shard(path, tokens, None), 0).tolist() == places
