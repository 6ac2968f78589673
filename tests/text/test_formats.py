"""Kinds of files: packed, tables, Arrow folders, other encodings. Each gives its texts or says what to do."""

import bz2
import csv
import gzip
import io
import json
import lzma
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from data.samples import SAMPLE_TEXTS
from paceline.core.errors import ConfigError, DataError
from paceline.text import long_lines
from paceline.text.config import PrepareConfig
from paceline.text.manifest import ValSplit
from paceline.text.prepare import prepare
from paceline.text.sources import Reader, files_left_aside, find_sources
from text.test_sources import texts

PACK: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}
CLEAN = [text for text in SAMPLE_TEXTS if "\0" not in text and "\r" not in text]


def table(texts_of: list[str], **options: str) -> bytes:
    file = io.StringIO(newline="")
    csv.writer(file, **options).writerows([["id", "text"], *enumerate(texts_of)])  # type: ignore[arg-type]
    return file.getvalue().encode()


def content(kind: str) -> bytes:
    records = [{"id": number, "text": text} for number, text in enumerate(CLEAN)]
    match kind:
        case "jsonl" | "ndjson":
            return "\n".join(map(json.dumps, records)).encode()
        case "json":
            return json.dumps(records, indent=1).encode()
        case "tsv":
            return table(CLEAN, delimiter="\t")
    return table(CLEAN)


@pytest.mark.parametrize("kind", ["jsonl", "ndjson", "json", "csv", "tsv"])
@pytest.mark.parametrize("packing", ["", *PACK])
def test_records_of_every_kind_packed_or_not(tmp_path: Path, kind: str, packing: str) -> None:
    path = tmp_path / f"x.{kind}{packing}"
    path.write_bytes(PACK.get(packing, bytes)(content(kind)))
    assert texts(path) == CLEAN
    assert texts(tmp_path) == CLEAN


@pytest.mark.parametrize("packing", PACK)
@pytest.mark.parametrize("suffix", [".txt", ".md"])
def test_packed_texts_are_documents(tmp_path: Path, suffix: str, packing: str) -> None:
    for number, text in enumerate(SAMPLE_TEXTS):
        (tmp_path / f"{number}{suffix}{packing}").write_bytes(PACK[packing](text.encode()))
    assert texts(tmp_path) == SAMPLE_TEXTS


@pytest.mark.parametrize("packing", PACK)
@pytest.mark.parametrize("kind", ["txt", "jsonl", "json", "csv"])
def test_a_packed_file_that_was_cut_off_is_named(tmp_path: Path, kind: str, packing: str) -> None:
    path = tmp_path / f"x.{kind}{packing}"
    path.write_bytes(PACK[packing](content(kind))[:-20])
    with pytest.raises(DataError, match=rf"x\.{kind}\{packing}: cannot be read to its end"):
        texts(path)


def test_zst_needs_a_package_and_is_read_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several frames one after another, as tools that append to a file leave them."""
    zstandard = pytest.importorskip("zstandard")
    path = tmp_path / "x.jsonl.zst"
    lines = [line + b"\n" for line in content("jsonl").split(b"\n")]
    path.write_bytes(b"".join(map(zstandard.ZstdCompressor().compress, lines)))
    monkeypatch.setitem(sys.modules, "compression", None)
    assert texts(path) == CLEAN
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "zstandard", None)
        with pytest.raises(DataError, match=r"x\.jsonl\.zst: .*pip install 'paceline\[data\]'"):
            texts(path)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(DataError, match=r"cannot be read to its end"):
        texts(path)


@pytest.mark.skipif(sys.version_info < (3, 14), reason="Python reads .zst from 3.14 on")
def test_zst_is_read_by_python_itself(tmp_path: Path) -> None:
    from compression import zstd  # type: ignore[import-not-found, unused-ignore]

    (tmp_path / "x.jsonl.zst").write_bytes(zstd.compress(content("jsonl")))
    assert texts(tmp_path) == CLEAN


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('[{"text": "a"}, {"text": "b"}]', ["a", "b"]),
        ('{"text": "a"}\n{"text": "b"}\n', ["a", "b"]),  # lines, as many files called .json hold
        ('{\n "id": [1, {"text": "no"}],\n "text": "a"\n}', ["a"]),
        (" [ ] ", []),
        ("", []),
    ],
)
def test_json_is_a_list_or_records_one_after_another(tmp_path: Path, text: str, expected: list[str]) -> None:
    (tmp_path / "x.json").write_text(text)
    assert texts(tmp_path) == expected


@pytest.mark.parametrize(
    "text", ['[{"text": "a"}', '[{"text": "a"} {"text": "b"}]', '[{"text": "a"}] 1', '{"text": "a']
)
def test_json_that_is_none_is_named_even_when_bad_records_may_be_left_out(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    for skip_bad in (False, True):
        with pytest.raises(DataError, match=r"x\.json: not JSON"):
            texts(tmp_path, skip_bad=skip_bad)


@pytest.mark.parametrize("block", [8, 1000])  # records that go on in the next block, and such as are whole
def test_bad_records_of_json_are_left_out_singly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr("paceline.text.byte_streams.BLOCK_BYTES", block)
    (tmp_path / "x.json").write_bytes(
        b'[{"text": "a"}, {"text": 1}, {"text": "\xff"}, {"text": "\\ud800"}, 5, {"text": "b"}]'
    )
    assert texts(tmp_path, skip_bad=True) == ["a", "b"]
    with pytest.raises(DataError, match="record 2: field 'text' is int"):
        texts(tmp_path)


def test_a_long_record_of_json_takes_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_lines, "LONGEST_TEXT", 40)
    monkeypatch.setattr("paceline.text.byte_streams.BLOCK_BYTES", 32)
    (tmp_path / "x.json").write_text(json.dumps([{"text": "long " * 30}, {"text": "short"}, {"text": "long " * 8}]))
    assert texts(tmp_path) == ["long " * 30, "short", "long " * 8]


def test_a_field_that_is_missing_is_answered_with_those_there_are(tmp_path: Path) -> None:
    contents = {"jsonl": '{"id": 1, "body": "x"}', "json": '[{"id": 1, "body": "x"}]', "csv": "id;body\n1;x\n"}
    for kind, written in contents.items():
        path = tmp_path / f"x.{kind}"
        path.write_text(written)
        with pytest.raises(DataError, match="'text'; it has id, body, choose one with --field"):
            texts(path)
        assert texts(path, field="body") == ["x"]


@pytest.mark.parametrize("mark", [",", ";", "\t"])
def test_tables_with_line_breaks_in_fields_and_rows_too_short(tmp_path: Path, mark: str) -> None:
    path = tmp_path / "x.csv"
    path.write_bytes(b"\xef\xbb\xbf" + table(['with "quotes",;\t', "two\nlines"], delimiter=mark) + b"3\n")
    with pytest.raises(DataError, match="row 3: field 'text' is NoneType"):
        texts(path)
    assert texts(path, skip_bad=True) == ['with "quotes",;\t', "two\nlines"]


@pytest.mark.parametrize("form", ["stream", "file"])
def test_a_folder_of_save_to_disk_is_read(tmp_path: Path, form: str) -> None:
    arrow = pytest.importorskip("pyarrow")
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        data = arrow.table({"id": list(range(len(SAMPLE_TEXTS))), "text": [split + text for text in SAMPLE_TEXTS]})
        path = tmp_path / split / "data-00000-of-00001.arrow"
        write = arrow.ipc.new_stream if form == "stream" else arrow.ipc.new_file
        with write(str(path), data.schema) as writer:
            writer.write_table(data, max_chunksize=2)
        for name in ("dataset_info.json", "state.json"):
            (tmp_path / split / name).write_text("{}")
    assert texts(tmp_path) == [split + text for split in ("test", "train") for text in SAMPLE_TEXTS]
    with pytest.raises(DataError, match="no column 'body'; it has id, text"):
        texts(tmp_path, field="body")
    path.write_bytes(b"no arrow")
    with pytest.raises(DataError, match=r"\.arrow: not a readable \.arrow file"):
        texts(path)


def test_the_test_split_of_a_dataset_dict_is_no_training_text(tmp_path: Path) -> None:
    """It is counted and named among what is not read, unless it is named itself."""
    arrow = pytest.importorskip("pyarrow")
    folder = tmp_path / "test"  # a name that means nothing where it is the folder itself
    for split in ("train", "test", "validation"):
        (folder / split).mkdir(parents=True)
        data = arrow.table({"text": [f"{split} text"]})
        with arrow.ipc.new_stream(str(folder / split / "data-00000-of-00001.arrow"), data.schema) as writer:
            writer.write_table(data)
    assert texts(folder) == ["test text", "train text", "validation text"]
    (folder / "dataset_dict.json").write_text("{}")
    assert texts(folder) == ["train text", "validation text"]
    assert texts(folder / "test") == ["test text"]
    options = {"inputs": (str(folder),), "out": str(tmp_path / "out"), "tokenizer": "bytes"}
    manifest = prepare(PrepareConfig(**options))  # type: ignore[arg-type]
    assert manifest.documents == 2
    assert "test/data-00000-of-00001.arrow" in manifest.other_names


def test_tables_beside_texts_are_left_aside_and_what_is_not_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name in ("a.txt", "meta.csv", "info.json", "scan.pdf", ".hidden"):
        (tmp_path / "in" / name).write_text(name)
    inputs = [str(tmp_path / "in")]
    sources = find_sources(inputs, "text")
    assert [source.name for source in sources] == ["a.txt"]
    assert files_left_aside(inputs, sources) == ["info.json", "meta.csv", "scan.pdf"]
    manifest = prepare(PrepareConfig(inputs=tuple(inputs), out=str(tmp_path / "out"), tokenizer="bytes"))
    assert (manifest.other_files, manifest.other_names) == (3, ("info.json", "meta.csv", "scan.pdf"))


# ---- bad bytes and encodings


def read(path: Path, **options: object) -> tuple[list[str], Reader]:
    reader = Reader("text", **options)  # type: ignore[arg-type]
    found = reader.pieces(find_sources([str(path)], "text"), ValSplit(share=0.0))
    return [piece.text.decode() for piece in found], reader


GOOD = "eine gute Zeile\n" * 5


@pytest.mark.parametrize("packing", ["", *PACK])
def test_a_bad_line_of_a_text_costs_that_line(tmp_path: Path, packing: str) -> None:
    path = tmp_path / f"x.txt{packing}"
    path.write_bytes(PACK.get(packing, bytes)(GOOD.encode() + b"M\xfcller\n" + GOOD.encode()))
    found, reader = read(path, bad="skip-line")
    assert found == [GOOD + GOOD]
    assert (reader.lost.lines, reader.lost.line_bytes, reader.lost.records) == (1, 7, 0)
    found, reader = read(path, bad="replace")
    assert found == [GOOD + "M\ufffdller\n" + GOOD]
    assert (reader.lost.lines, reader.lost.replaced_bytes) == (0, 1)
    with pytest.raises(DataError, match=r"line 6: byte 0xfc is not UTF-8; name its --encoding, or .*replace"):
        read(path)
    assert read(path, encoding="cp1252")[0] == [GOOD + "Müller\n" + GOOD]


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv"])
def test_bad_bytes_of_records_are_replaced_or_cost_the_record(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"x.{kind}"
    path.write_bytes(
        {
            "jsonl": b'{"text": "a"}\n{"text": "M\xfc"}\n',
            "json": b'[{"text": "a"}, {"text": "M\xfc"}]',
            "csv": b"text\na\nM\xfc\n",
        }[kind]
    )
    found, reader = read(path, bad="replace")
    assert (found, reader.lost.replaced_bytes) == (["a", "M\ufffd"], 1)
    found, reader = read(path, bad="skip-line")
    assert (found, reader.lost.records) == (["a"], 1)
    assert read(path, encoding="latin-1")[0] == ["a", "Mü"]


def test_bad_bytes_of_columns_are_replaced(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "x.parquet"
    parquet.write_table(arrow.table({"text": arrow.array([b"a", b"M\xfc"], arrow.binary())}), path)
    found, reader = read(path, bad="replace")
    assert (found, reader.lost.replaced_bytes) == (["a", "M\ufffd"], 1)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32", "shift_jis", "utf-8-sig"])
@pytest.mark.parametrize("kind", ["txt", "jsonl", "json", "csv"])
def test_other_encodings(tmp_path: Path, encoding: str, kind: str) -> None:
    text = "日本語 and more\n" * 3
    written = {"txt": text, "json": json.dumps([{"text": text}], ensure_ascii=False), "csv": f'text\n"{text}"\n'}
    written["jsonl"] = json.dumps({"text": text}, ensure_ascii=False) + "\n"
    path = tmp_path / f"x.{kind}"
    path.write_bytes(written[kind].encode(encoding))
    assert read(path, encoding=encoding)[0] == [text]


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_what_is_not_of_the_encoding_is_named_left_out_or_replaced(
    tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.text.byte_streams.BLOCK_BYTES", size)
    path = tmp_path / "x.txt"
    path.write_bytes("good\n".encode("utf-16-le") + b"x\x00\x00\xd8y\x00\n\x00" + "fine".encode("utf-16-le"))
    with pytest.raises(DataError, match="line 2: not utf-16-le; name its --encoding"):
        read(path, encoding="utf-16-le")
    assert "".join(read(path, encoding="utf-16-le", bad="skip-line")[0]) == "good\nfine"
    assert "".join(read(path, encoding="utf-16-le", bad="replace")[0]) == "good\nx\ufffdy\nfine"


def test_a_line_too_long_to_be_held_is_left_out_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.text.byte_streams.BLOCK_BYTES", 8)
    monkeypatch.setattr("paceline.text.sources.LONG_LINE_BYTES", 32)
    path = tmp_path / "x.txt"
    path.write_bytes(b"a" * 64 + b"\xff" + b"b" * 63 + b"\nlast")
    found, reader = read(path, bad="skip-line")
    assert "".join(found) == "a" * 64 + "b" * 32 + "\nlast"
    assert (reader.lost.lines, reader.lost.line_bytes) == (1, 32)


@pytest.mark.parametrize("encoding", ["", "no-such", "hex", "rot13"])
def test_an_encoding_that_is_none_is_refused(encoding: str) -> None:
    with pytest.raises(ConfigError, match="--encoding"):
        PrepareConfig(inputs=("x",), out="y", encoding=encoding)


READ = """
import re, sys
from pathlib import Path
from paceline.text.manifest import ValSplit
from paceline.text.separator import compile_separator
from paceline.text.sources import Reader, find_sources
reader = Reader("text", bad=sys.argv[2], separator=compile_separator("<|endoftext|>"))
print(sum(len(piece.text) for piece in reader.pieces(find_sources([sys.argv[1]], "text"), ValSplit(share=0.0))))
print(int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) >> 10)
"""


@pytest.mark.parametrize("bad", ["skip-line", "replace"])
@pytest.mark.parametrize("kind", ["txt", "json", "csv"])
def test_what_unpacks_to_much_is_read_in_bounded_memory(tmp_path: Path, kind: str, bad: str) -> None:
    """27 MB of many lines, or of many records, none of which is kept."""
    path = tmp_path / f"x.{kind}.gz"
    record = {
        "txt": "words " * 150 + "\n",
        "json": json.dumps({"text": "words " * 150}) + ",",
        "csv": "words " * 150 + "\n",
    }
    ends = {"txt": ("", ""), "json": ("[", '{"text": ""}]'), "csv": ("text\n", "")}
    count = 30_000
    with gzip.open(path, "wt", compresslevel=1) as file:
        file.write(ends[kind][0])
        for _ in range(count // 100):
            file.write(record[kind] * 100)
        file.write(ends[kind][1])
    ended = subprocess.run(
        [sys.executable, "-c", READ, path, bad], capture_output=True, text=True, check=True, timeout=300
    )
    length, peak_mib = map(int, ended.stdout.split())
    assert length == (900 + (kind == "txt")) * count
    assert peak_mib < 60
