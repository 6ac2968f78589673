"""Every kind of input gives the same documents, and what is bad is named by file and line."""

import gzip
import io
import json
import random
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.samples import SAMPLE_TEXTS
from paceline.core.errors import DataError
from paceline.text.manifest import ValSplit
from paceline.text.records import parse_line
from paceline.text.sources import Piece, Reader, cut_lone_text, cut_text, find_sources
from paceline.text.tokenizer import train_tokenizer
from text.test_tokenizer import in_tiktoken

LETTERS = "ts  1'.\n\t\u00a0\u3000日é🙂\x1c"
WORDY = st.text(st.sampled_from(LETTERS), max_size=200)
GREEDY = train_tokenizer("bpe-2000", ["".join(random.Random(0).choices(LETTERS, k=50_000))])
"""Merges whatever the word rule lets it merge, white space included."""
GREEDY_TIKTOKEN = in_tiktoken(GREEDY)


def write_jsonl(path: Path, texts: list[str], field: str = "text") -> Path:
    content = "".join(json.dumps({field: text, "id": n}) + "\n" for n, text in enumerate(texts)).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def pieces(*inputs: Path | str, field: str = "text", skip_bad: bool = False) -> list[Piece]:
    sources = find_sources([str(given) for given in inputs], "text")
    return list(Reader(field, bad="skip-line" if skip_bad else "error").pieces(sources, ValSplit(share=0.0)))


def texts(*inputs: Path | str, **options: str | bool) -> list[str]:
    found = pieces(*inputs, **options)  # type: ignore[arg-type]
    assert all(piece.opens for piece in found)
    return [piece.text.decode() for piece in found]


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "parquet", "txt", "md"])
def test_every_kind_gives_the_texts_byte_for_byte(tmp_path: Path, suffix: str) -> None:
    if suffix == "parquet":
        arrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(arrow.table({"text": SAMPLE_TEXTS}), tmp_path / "x.parquet")
    elif suffix in ("txt", "md"):
        for number, text in enumerate(SAMPLE_TEXTS):
            (tmp_path / f"{number}.{suffix}").write_bytes(text.encode())
    else:
        write_jsonl(tmp_path / f"x.{suffix}", SAMPLE_TEXTS)
    assert texts(tmp_path) == SAMPLE_TEXTS


def test_a_folder_is_read_in_name_order_and_through_its_folders(tmp_path: Path) -> None:
    for name in ("b/2.txt", "a.txt", "b/1.jsonl", "c.md", "d.doc"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    write_jsonl(tmp_path / "b/1.jsonl", ["first", "second"])
    assert texts(tmp_path) == ["a.txt", "first", "second", "b/2.txt", "c.md"]
    names = [source.name for source in find_sources([str(tmp_path)], "text")]
    assert names == ["a.txt", "b/1.jsonl", "b/2.txt", "c.md"]


def test_another_field_and_blank_lines(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", ["a", "b"], field="body")
    path.write_bytes(b"\n" + path.read_bytes() + b"  \n")
    assert texts(path, field="body") == ["a", "b"]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"{'text': 1}", "not JSON"),
        (b'{"text": "half', "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"texts": "x"}', "no field 'text'"),
        (b'["text"]', "no field 'text'"),
        (b'{"text": null}', "is NoneType, not text"),
        (b'{"text": "\xff"}', "byte 0xff is not UTF-8"),
        (b'{"text": "\\ud800"}', "half a surrogate pair"),
    ],
)
@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz"])
def test_a_bad_line_is_named_or_skipped(tmp_path: Path, line: bytes, problem: str, suffix: str) -> None:
    path = tmp_path / f"x.{suffix}"
    content = b'{"text": "good"}\n' + line + b'\n{"text": "fine"}\n'
    path.write_bytes(gzip.compress(content) if suffix.endswith("gz") else content)
    with pytest.raises(DataError, match=problem) as caught:
        texts(path)
    assert str(caught.value).startswith(f"{path}, line 2: ")
    assert "--skip-bad" in str(caught.value)
    assert texts(path, skip_bad=True) == ["good", "fine"]


@given(
    line=st.binary(max_size=60)
    | st.dictionaries(st.just("text"), st.none() | st.text()).map(json.dumps).map(str.encode)
)
def test_any_line_is_a_text_a_problem_or_blank(line: bytes) -> None:
    text, problem = parse_line(line, "text")
    assert text is None or problem is None
    if text is not None:
        assert text == json.loads(line)["text"]


@pytest.mark.parametrize("place", [0, 70, 2**20 - 1, 2**20, 2**20 + 50])  # around the edge of a block
def test_a_line_that_is_not_utf8_is_named_or_skipped(tmp_path: Path, place: int) -> None:
    content = bytearray((b"x" * 9 + b"\n") * 110_000)
    content[place] = 0xFF
    bad = tmp_path / "bad.txt"
    bad.write_bytes(content)
    (tmp_path / "good.txt").write_text("good")
    line = bytes(content[:place]).count(b"\n") + 1
    with pytest.raises(DataError, match=f"line {line:,}: byte 0xff is not UTF-8") as caught:
        pieces(tmp_path)
    assert str(bad) in str(caught.value)
    *parts, good = pieces(tmp_path, skip_bad=True)
    assert good.text == b"good"
    lines = b"".join(piece.text for piece in parts).split(b"\n")
    assert lines == [b"x" * 9] * (110_000 - 1) + [b""]


def test_a_character_cut_off_at_the_end_is_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_bytes("a\né".encode()[:-1])
    with pytest.raises(DataError, match="line 2: byte 0xc3"):
        texts(tmp_path)


def test_a_multi_byte_character_may_straddle_blocks(tmp_path: Path) -> None:
    text = "x" * (2**20 - 1) + "日本" * 10
    (tmp_path / "x.txt").write_bytes(text.encode())
    assert "".join(piece.text.decode() for piece in pieces(tmp_path)) == text


def test_a_damaged_gzip_file_is_named(tmp_path: Path) -> None:
    whole = write_jsonl(tmp_path / "x.jsonl.gz", ["a" * 1000] * 50).read_bytes()
    for damaged in (whole[:-20], b"not gzip at all"):
        (tmp_path / "x.jsonl.gz").write_bytes(damaged)
        with pytest.raises(DataError, match=r"x.jsonl.gz: cannot be read to its end"):
            texts(tmp_path)


@pytest.mark.parametrize("suffix", ["txt", "jsonl"])
def test_a_disk_that_fails_while_reading_is_told_with_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    class Failing(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            raise OSError("Input/output error")

        def readline(self, size: int | None = -1) -> bytes:
            raise OSError("Input/output error")

        __next__ = readline

    (tmp_path / f"x.{suffix}").touch()
    monkeypatch.setattr("paceline.text.sources._open", lambda _: Failing())
    with pytest.raises(DataError, match=rf"x\.{suffix}: cannot be read to its end \(Input/output"):
        texts(tmp_path)


@pytest.mark.parametrize(
    "kind", ["string", "large_string", "string_view", "binary", "binary_view", "dictionary", "dictionary of binary"]
)
def test_every_kind_of_text_column_is_read(tmp_path: Path, kind: str) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    texts_of = [*SAMPLE_TEXTS, *SAMPLE_TEXTS]  # some twice, as dictionaries are made for
    path = tmp_path / "x.parquet"
    if kind.startswith("dictionary"):
        values = arrow.array(texts_of, arrow.binary() if kind.endswith("binary") else arrow.string())
        column = values.dictionary_encode()
    else:
        column = arrow.array(
            texts_of if "string" in kind else [text.encode() for text in texts_of], getattr(arrow, kind)()
        )
    parquet.write_table(arrow.table({"text": column}), path)
    assert texts(path) == texts_of


def test_parquet_problems_are_named(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "x.parquet"
    parquet.write_table(arrow.table({"text": ["a", None, "b"]}), path)
    with pytest.raises(DataError, match="row 2: field 'text' is NoneType"):
        texts(path)
    assert texts(path, skip_bad=True) == ["a", "b"]
    not_utf8 = arrow.array([b"a", b"\xff"], arrow.binary()).view(arrow.string())
    parquet.write_table(arrow.table({"text": not_utf8}), path)
    with pytest.raises(DataError, match="row 2: byte 0xff is not UTF-8"):
        texts(path)
    assert texts(path, skip_bad=True) == ["a"]
    with pytest.raises(DataError, match="no column 'body'; it has text"):
        texts(path, field="body")
    path.write_bytes(b"PAR1 no")
    with pytest.raises(DataError, match=r"x.parquet: not a readable"):
        texts(path)


def test_parquet_without_pyarrow_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.parquet").touch()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"paceline\[data\]"):
        texts(tmp_path)


def test_inputs_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no \.txt, .* files there"):
        find_sources([str(tmp_path)], "text")
    with pytest.raises(DataError, match=r"none\.txt: does not exist"):
        find_sources([str(tmp_path / "none.txt")], "text")
    (tmp_path / "x.doc").touch()
    with pytest.raises(DataError, match=r"x\.doc: not a kind of file"):
        find_sources([str(tmp_path / "x.doc")], "text")


@pytest.mark.parametrize("suffix", ["txt", "md"])
def test_a_lone_text_is_cut_at_a_line_so_that_there_is_validation(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"x.{suffix}"
    path.write_text("".join(f"line {n}\n" for n in range(10_000)))
    sources = cut_lone_text(find_sources([str(path)], "text"), val_share=0.1)
    found = list(Reader("text").pieces(sources, ValSplit(share=0.1)))
    assert [piece.side for piece in found] == ["train", "val"]
    assert b"".join(piece.text for piece in found) == path.read_bytes()
    assert found[1].text.startswith(b"line ")
    assert 0.09 < len(found[1].text) / path.stat().st_size <= 0.1
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    with pytest.raises(DataError, match="line 10,000"):
        list(Reader("text").pieces(sources, ValSplit(share=0.1)))


@pytest.mark.parametrize("end", ["", "\n", " \r\n"])
@pytest.mark.parametrize("text", ["word " * 20_000, "日本語" * 5_000, "🙂" * 11_001, "first line\n" + "ACGT" * 11_000])
def test_a_lone_text_without_a_late_line_break_has_validation_too(tmp_path: Path, text: str, end: str) -> None:
    path = tmp_path / "x.txt"
    path.write_bytes((text.rstrip() + end).encode())
    for share in (0.1, 0.1001, 0.1002, 0.1003):  # a cut at any byte of a character
        found = list(
            Reader("text").pieces(cut_lone_text(find_sources([str(path)], "text"), share), ValSplit(share=share))
        )
        assert [piece.side for piece in found] == ["train", "val"]
        assert b"".join(piece.text for piece in found) == path.read_bytes()
        assert all(piece.text.decode().strip() for piece in found)
        assert 0.09 < len(found[1].text) / path.stat().st_size < 0.11
        assert not text.startswith("word") or found[1].text.startswith(b"word ")


@pytest.mark.parametrize("text", ["", "a", "a\n", "word\n\n", "é"])
def test_a_text_too_short_to_cut_stays_whole(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.txt"
    path.write_bytes(text.encode())
    sources = cut_lone_text(find_sources([str(path)], "text"), val_share=0.005)
    assert [(source.side, source.bytes) for source in sources] == [("train", len(text.encode()))]


@given(text=WORDY, size=st.integers(1, 40))
def test_pieces_encoded_apart_equal_the_text_encoded_whole(text: str, size: int) -> None:
    cut = list(cut_text([text], size))
    assert "".join(cut) == text
    for tokenizer in (GREEDY, GREEDY_TIKTOKEN):
        assert [i for piece in cut for i in tokenizer.encode(piece)] == tokenizer.encode(text)


@given(text=WORDY, size=st.integers(1, 40), block=st.integers(1, 9))
def test_where_text_is_cut_does_not_depend_on_how_it_was_read(text: str, size: int, block: int) -> None:
    """A cut is seen when the character after it is there; until then the piece waits."""
    blocks = [text[i : i + block] for i in range(0, len(text), block)]
    assert list(cut_text(blocks, size)) == list(cut_text([text], size))


def test_long_texts_are_cut_near_the_wanted_size() -> None:
    found = list(cut_text(["some words " * 10_000], 1000))
    assert len(found) > 100
    assert max(map(len, found)) < 1020


def test_sides_follow_the_text_and_the_share() -> None:
    source = find_sources(["-"], "jsonl")
    assert source[0].kind == "jsonl"
    lines = b"".join(b'{"text": "document %d"}\n' % n for n in range(4000))
    sides = [piece.side for piece in read_stdin(lines, val_share=0.25)]
    assert 900 < sides.count("val") < 1100
    assert sides == [piece.side for piece in read_stdin(lines, val_share=0.25)]


def read_stdin(content: bytes, val_share: float) -> list[Piece]:
    reader = Reader("text")
    source = find_sources(["-"], "jsonl")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("paceline.text.sources._open", lambda _: io.BytesIO(content))
        return list(reader.pieces(source, ValSplit(share=val_share)))
