"""`data prepare | verify | stats` as a user calls them: what is damaged is named, and exit codes tell."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from paceline.commands import data
from paceline.commands.data import ProgressLines, _verified
from paceline.core.errors import ConfigError, DataError
from paceline.data.shards import manifest_path, open_shard, positions_of
from paceline.settings.data import DataConfig
from paceline.text.dataset import open_dataset
from paceline.text.prepare import Status
from paceline.text.shard_writer import write_shard
from paceline.text.stats import document_lengths, histogram, stats
from paceline.text.tokenizer import train_tokenizer
from paceline.text.verify import verify
from text.test_prepare import stdin_of
from text.test_sources import write_jsonl

TEXTS = [f"document {n} " + "word " * (n % 37) for n in range(500)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A prepared folder: 500 documents, 4 shards of training and one of validation."""
    path = write_jsonl(tmp_path / "in.jsonl", TEXTS)
    arguments = [str(path), "--out", str(tmp_path / "out"), "--tokenizer", "bytes", "--shard-tokens", "15000"]
    assert data.prepare([*arguments, "--val-share", "0.05"]) == 0
    return tmp_path / "out"


def test_prepare_tells_what_it_made(folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    tokens = sum(len(text) + 1 for text in TEXTS)
    arguments = [str(tmp_path / "in.jsonl"), "--out", str(folder), "--tokenizer", "bytes", "--shard-tokens", "15000"]
    capsys.readouterr()
    assert data.prepare([*arguments, "--val-share", "0.05", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["complete"]
    assert sum(shard["tokens"] for shard in said["shards"]) == tokens


def test_prepare_warns_when_a_side_is_empty(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_jsonl(tmp_path / "in.jsonl", ["only one"])
    assert data.prepare([str(path), "--out", str(tmp_path / "out"), "--tokenizer", "bytes"]) == 0
    assert "no document went to val" in capsys.readouterr().out


def test_of_standard_input_prepare_says_which_share_gives_validation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It cannot be looked at beforehand, so few documents may leave none to validation; those of a file never do."""
    path = write_jsonl(tmp_path / "in.jsonl", [f"document {number}" for number in range(15)])
    args = ["--stdin-format", "jsonl", "--tokenizer", "bytes", "--out", str(tmp_path / "out")]
    with stdin_of(path.read_bytes()):
        assert data.prepare(["-", *args]) == 0
    assert "a run needs both: --val-share 0.2 --overwrite takes about 3 of 15" in capsys.readouterr().out
    with stdin_of(path.read_bytes()):
        assert data.prepare(["-", *args, "--val-share", "0.2", "--overwrite"]) == 0
    assert data.prepare([str(path), *args[:-1], str(tmp_path / "file")]) == 0
    assert "no document" not in capsys.readouterr().out


def test_what_is_lost_and_what_is_not_read_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.txt").write_bytes(b"a line of text\n" * 10_000 + b"M\xfcller\n" * 9)
    (folder / "notes.pdf").touch()
    arguments = [str(folder), "--out", str(tmp_path / "out"), "--tokenizer", "bytes"]
    with pytest.raises(DataError, match=r"line 10,001: byte 0xfc is not UTF-8.*--encoding.*--on-bad-text"):
        data.prepare(arguments)
    assert data.prepare([*arguments, "--skip-bad"]) == 0
    said = capsys.readouterr()
    assert "left out: 9 bad lines (63 B)\nnot read: 1 file (notes.pdf)" in said.out
    assert "WARNING" not in said.err
    assert data.prepare([*arguments, "--on-bad-text", "skip-line"]) == 0  # the same by its other name
    capsys.readouterr()
    (folder / "a.txt").write_bytes(b"a line of text\n" * 1_000 + "Müller\n".encode("cp1252") * 90)
    for bad, replaced in (("replace", 90), ("skip-line", 0)):
        assert data.prepare([*arguments, "--on-bad-text", bad, "--overwrite", "--json"]) == 0
        said = capsys.readouterr()
        assert ("WARNING: 4.0% of the input" in said.err) == (bad == "skip-line")
        assert json.loads(said.out)["replaced_bytes"] == replaced
    assert data.prepare([*arguments, "--encoding", "cp1252", "--overwrite"]) == 0
    assert "left out" not in capsys.readouterr().out
    with pytest.raises(ConfigError, match="give one of them"):
        data.prepare([*arguments, "--skip-bad", "--on-bad-text", "replace"])


def test_records_that_are_lost_count_by_their_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_jsonl(tmp_path / "in.jsonl", TEXTS[:95])
    path.write_bytes(path.read_bytes() + b'{"text": null}\n' * 5)
    assert data.prepare([str(path), "--out", str(tmp_path / "out"), "--tokenizer", "bytes", "--skip-bad"]) == 0
    assert "WARNING: 5.0% of the input could not be read" in capsys.readouterr().err


def test_a_validation_set_that_is_too_small_or_too_large_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_jsonl(tmp_path / "in.jsonl", ["word " * 2_000 + str(n) for n in range(200)])
    for share, said in (("0.01", "fewer than 50,000"), ("0.7", "more than the"), ("0.1", None)):
        out = str(tmp_path / share)
        assert data.prepare([str(path), "--out", out, "--tokenizer", "bytes", "--val-share", share]) == 0
        printed = capsys.readouterr().out
        assert said in printed if said else "validation has" not in printed


def test_a_sound_folder_verifies(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert data.verify([str(folder)]) == 0
    assert "ok" in capsys.readouterr().out
    assert all(check.hashed for check in verify(folder).files if check.tokens)


@pytest.mark.parametrize(
    ("file", "damage", "problem"),
    [
        ("data_train_000002.bin", "flip", "the hash differs"),
        ("data_train_000002.bin", "truncate", "truncated"),
        ("data_train_000002.bin", "delete", "missing"),
        ("data_train_000002.bin", "swap", "not the shard that dataset.json lists"),
        ("data_train_000002.bin.json", "truncate", "not valid JSON"),
        ("tokenizer.json", "truncate", "not valid JSON"),
        ("dataset.json", "truncate", "not valid JSON"),
    ],
)
def test_damage_is_named(
    folder: Path, file: str, damage: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / file
    content = path.read_bytes()
    if damage == "flip":
        path.write_bytes(content[:5000] + bytes([content[5000] ^ 4]) + content[5001:])
    elif damage == "truncate":
        path.write_bytes(content[:-7])
    elif damage == "delete":
        path.unlink()
    else:
        write_shard(path, np.arange(100, dtype=np.uint16), documents=0, tokenizer="")
    capsys.readouterr()
    assert data.verify([str(folder)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines[:-1] if problem in line and line.startswith(file.removesuffix(".json")[:10])]
    assert data.verify([str(folder), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False


@pytest.mark.parametrize("place", [0, 3, 9, 1024, 20_000])
def test_any_flipped_bit_of_a_shard_is_found(folder: Path, place: int) -> None:
    path = folder / "data_train_000001.bin"
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    assert [check.file for check in verify(folder).problems] == [path.name]
    assert not verify(path).ok


def test_an_unfinished_folder_does_not_verify(folder: Path) -> None:
    path = folder / "dataset.json"
    path.write_text(path.read_text().replace('"complete": true', '"complete": false'))
    assert [check.file for check in verify(folder).problems] == ["dataset.json"]


def test_a_tokenizer_that_did_not_make_the_shards_is_refused(folder: Path) -> None:
    """Its own file is sound, so only the shards' manifests can tell; bits per byte would be wrong."""
    train_tokenizer("bpe-280", ["the thing " * 50]).save(folder)
    for found in (verify(folder), _verified(str(folder))[1]):
        assert [check.file for check in found.problems] == ["tokenizer.json"]
        assert "not the tokenizer that data_train_000001.bin was made with" in str(found.problems[0].problem)
    with pytest.raises(DataError, match=r"tokenizer\.json: not the tokenizer that .*\.bin was made with"):
        open_dataset(DataConfig(dir=str(folder)), 512)
    (folder / "tokenizer.json").unlink()
    assert (
        open_dataset(DataConfig(dir=str(folder), tokenizer="bytes", end_of_text=256), 512).tokenizer().name == "bytes"
    )


@pytest.mark.parametrize("said", ["", "bpe-280"])  # of older folders, and by name as in downloaded ones
def test_a_manifest_without_a_fingerprint_fits_the_tokenizer(folder: Path, said: str) -> None:
    train_tokenizer("bpe-280", ["the thing " * 50]).save(folder)
    for path in folder.glob("*.bin.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer": said}))
    assert verify(folder).ok
    assert open_dataset(DataConfig(dir=str(folder)), 512).tokenizer().name == "bpe-280"


def test_shards_without_manifests_have_their_size_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x_train_000001.bin"
    write_shard(path, np.arange(100, dtype=np.uint16), documents=0, tokenizer="")
    manifest_path(path).unlink()
    assert data.verify([str(tmp_path)]) == 0
    assert "1 without a hash" in capsys.readouterr().out


@pytest.mark.parametrize("command", [verify, stats])
def test_folders_without_shards_are_refused(tmp_path: Path, command: object) -> None:
    with pytest.raises(DataError, match="no shards there"):
        command(tmp_path)  # type: ignore[operator]
    with pytest.raises(DataError, match="no shards there"):
        command(tmp_path / "none")  # type: ignore[operator]


def test_stats_count_documents_by_where_they_begin_and_whole(folder: Path) -> None:
    result = stats(folder)
    assert result.end_of_text == 256
    assert result.total.documents == len(TEXTS) == sum(shard.documents for shard in result.shards)
    assert result.total.tokens == sum(len(text) + 1 for text in TEXTS)
    for shard in result.shards:
        assert shard.documents == len(positions_of(open_shard(folder / shard.file), 256))
    expected = np.bincount([(len(text) + 1).bit_length() - 1 for text in TEXTS])
    assert {bucket.at_least: bucket.documents for bucket in result.total.lengths if bucket.documents} == {
        2**k: count for k, count in enumerate(expected.tolist()) if count
    }


def test_a_document_that_straddles_shards_is_counted_once_with_its_whole_length(tmp_path: Path) -> None:
    stream = np.array([9, 0, 1, 1, 0, 1, 1, 1, 1, 0, 1], dtype=np.uint16)  # text before the first end-of-text too
    for number, part in enumerate((stream[:3], stream[3:6], stream[6:])):
        write_shard(tmp_path / f"x_train_{number}.bin", part, documents=0, tokenizer="")
    shards = [open_shard(tmp_path / f"x_train_{number}.bin") for number in range(3)]
    assert [found.tolist() for found in document_lengths(shards, 0)] == [[3], [5], [2]]
    result = stats(tmp_path, end_of_text=0)
    assert [shard.documents for shard in result.shards] == [1, 1, 1]


def test_sides_do_not_run_into_each_other(tmp_path: Path) -> None:
    for name, tokens in (("x_train_000001", [0, 1, 1]), ("x_val_000000", [1, 0, 1])):
        write_shard(tmp_path / f"{name}.bin", np.array(tokens, dtype=np.uint16), documents=1, tokenizer="")
    assert [[b.at_least for b in shard.lengths] for shard in stats(tmp_path, 0).shards] == [[2], [2]]


def test_histogram_buckets_are_powers_of_two_without_holes() -> None:
    found = {bucket.at_least: bucket.documents for bucket in histogram(np.array([3, 4, 7, 8, 40, 2**40]))}
    assert (found[2], found[4], found[8], found[16], found[32], found[2**40]) == (1, 2, 1, 0, 1, 1)
    assert len(found) == 40


def test_stats_are_shown_as_text_and_as_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert data.stats([str(folder)]) == 0
    assert "in all: 500 documents" in capsys.readouterr().out
    assert data.stats([str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["total"]["documents"] == 500


def test_progress_lines_tell_rate_and_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    show = ProgressLines(lambda: now[0])
    for now[0], read in ((5.0, 50 << 20), (10.0, 100 << 20), (15.0, 110 << 20), (30.0, 300 << 20)):
        show(Status(bytes_read=read, bytes_total=600 << 20, tokens=1_234_567, shards=3))
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "100.0 MiB read, 10.0 MiB/s, 1.23 M tokens, 3 shards, 50.0s left",
        "300.0 MiB read, 10.0 MiB/s, 1.23 M tokens, 3 shards, 30.0s left",
    ]


def test_the_commands_module_is_light() -> None:
    """Help must not wait for numpy, let alone torch."""
    code = "import sys, paceline.commands.data; sys.exit(bool({'torch', 'numpy', 'tokenizers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
