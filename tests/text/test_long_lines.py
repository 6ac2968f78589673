"""A line that is read in blocks gives what the same line read whole gives, in memory that does not depend on it."""

import gzip
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import DataError
from paceline.text import sources
from paceline.text.long_lines import spool_text
from paceline.text.manifest import ValSplit
from paceline.text.records import parse_line
from paceline.text.sources import Reader, cut_text, find_sources

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["text", "a"]), inner, max_size=2),
    max_leaves=6,
)
OBJECTS = st.lists(st.tuples(st.sampled_from(["text", "a", "\u00e9"]), VALUES), max_size=4)


def line_of(members: list[tuple[str, object]], *, ascii_only: bool) -> bytes:
    """An object in which a key may stand twice."""
    parts = (f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=ascii_only)}" for key, value in members)
    return ("{" + " , ".join(parts) + "}").encode(errors="surrogatepass")


def in_blocks(line: bytes, size: int) -> Iterator[bytes]:
    return (line[at : at + size] for at in range(0, len(line), size))


def answer(line: bytes, size: int = 3) -> tuple[str | None, str | None]:
    file, problem = spool_text(in_blocks(line, size), "text")
    if file is None:
        return None, problem
    with file:
        return file.read(), problem


@given(OBJECTS.map(lambda m: line_of(m, ascii_only=True)) | OBJECTS.map(lambda m: line_of(m, ascii_only=False)),
       st.integers(1, 40))  # fmt: skip
def test_a_line_in_blocks_is_the_line_read_whole(line: bytes, size: int) -> None:
    assert answer(line, size) == parse_line(line, "text")


@given(OBJECTS.map(lambda m: line_of(m, ascii_only=True)), st.data())
def test_what_is_not_json_whole_is_not_json_in_blocks(line: bytes, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(line)))
    noise = data.draw(st.binary(max_size=1) | st.text('{}[]",:\\u1 tn-.e', max_size=3).map(str.encode))
    bad = line[:at] + noise + line[at + data.draw(st.integers(0, 2)) :]
    (text, problem), (whole, expected) = answer(bad), parse_line(bad, "text")
    assert (text, problem is None) == (whole, expected is None)
    assert text is not None or (problem or "").split("(")[0] == (expected or "").split("(")[0]


@pytest.mark.parametrize(
    "text", ["\\ud83d\\ude00", "\\ud83d", "\\ud83dx", "\\\\ud83d\\\\", "\\\\\\ud83d\\ude00", "\\ude00"]
)
@pytest.mark.parametrize("size", range(1, 15))
def test_an_escape_is_not_cut_in_two(text: str, size: int) -> None:
    line = f'{{"text": "{text}"}}'.encode()
    assert answer(line, size) == parse_line(line, "text")


def test_long_lines_short_ones_and_bad_ones_are_read_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "LONG_LINE_BYTES", 40)
    monkeypatch.setattr(sources, "BLOCK_BYTES", 7)
    texts = ["short", "long " * 30, "", "x" * 29, "x" * 28, "x" * 27, "last " * 20]
    lines = [json.dumps({"text": text}) for text in texts]
    lines.insert(2, '{"text": "bad' + "x" * 90)
    lines.insert(5, " " * 90)
    path = tmp_path / "x.jsonl"
    path.write_text("\n".join(lines))
    found = Reader("text", bad="skip-line").pieces(find_sources([str(path)], "text"), ValSplit(share=0.0))
    assert [piece.text.decode() for piece in found] == texts
    with pytest.raises(DataError, match="line 3: not JSON"):
        list(Reader("text").pieces(find_sources([str(path)], "text"), ValSplit(share=0.0)))


def test_a_line_without_a_space_is_cut_all_the_same() -> None:
    assert [len(piece) for piece in cut_text(["x" * 95], 10, 20)] == [20, 20, 20, 20, 15]


@given(text=st.text("ab \n", max_size=90), block=st.integers(1, 9), size=st.integers(1, 9), more=st.integers(0, 9))
def test_where_it_is_cut_does_not_depend_on_how_it_was_read(text: str, block: int, size: int, more: int) -> None:
    blocks = [text[at : at + block] for at in range(0, len(text), block)]
    pieces = list(cut_text(blocks, size, size + more))
    assert pieces == list(cut_text([text], size, size + more))
    assert "".join(pieces) == text
    assert max(map(len, pieces)) <= size + more + 1  # one that is last may be longer by what a cut would have to see


READ = """
import re, sys
from pathlib import Path
from paceline.text.manifest import ValSplit
from paceline.text.sources import Reader, find_sources
sources = find_sources([sys.argv[1]], "text")
print(sum(len(piece.text) for piece in Reader("text").pieces(sources, ValSplit(share=0.0))))
print(int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) >> 10)  # ru_maxrss is inherited
"""


def write_line(path: Path, text: bytes, count: int) -> None:
    """One line whose text is `text` so often."""
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(b'{"id": 1, "text": "')
        for _ in range(count):
            file.write(text)
        file.write(b'"}\n')


@pytest.mark.parametrize("mib", [24, pytest.param(600, marks=pytest.mark.slow)])
@pytest.mark.parametrize("word", [b"several words ", b"endless", b"\\u00e9\\n"])
def test_one_line_is_read_in_bounded_memory(tmp_path: Path, mib: int, word: bytes) -> None:
    path = tmp_path / "x.jsonl.gz"
    block = word * ((1 << 20) // len(word))
    write_line(path, block, mib)
    ended = subprocess.run([sys.executable, "-c", READ, path], capture_output=True, text=True, check=True, timeout=300)
    length, peak_mib = map(int, ended.stdout.split())
    assert length == len(json.loads(b'"' + block + b'"').encode()) * mib
    assert peak_mib < 110
