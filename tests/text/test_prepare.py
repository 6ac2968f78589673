"""Preparation: the shards hold the text, and neither processes, kills nor mistakes change a byte of them."""

import contextlib
import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from paceline.core.errors import ConfigError, DataError, PacelineError
from paceline.core.files import blake2b_of
from paceline.data.shards import open_shard, positions_of
from paceline.text import prepare as module
from paceline.text.config import PrepareConfig
from paceline.text.continuation import only_writer
from paceline.text.manifest import DatasetManifest, read_dataset
from paceline.text.prepare import Status, prepare
from paceline.text.split import choose_side, split_number
from paceline.text.tokenizer import load_tokenizer
from paceline.text.verify import verify
from text.test_sources import write_jsonl
from text.test_tokenizer import TOKENIZERS

WORDS = ("the", "theory", "of", "it's", "say", "there:", "naïve", "日本", "<|endoftext|>", "thing,\n", "  gap", "🙂")


def some_texts(count: int, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randrange(0, 400))) for _ in range(count)]


TEXTS = some_texts(300)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 4 KiB, so that small inputs have many."""
    monkeypatch.setattr(module, "CHUNK_BYTES", 4096)


@pytest.fixture
def config(tmp_path: Path, small_chunks: None) -> PrepareConfig:
    """300 documents in two files; with bytes as tokens about 450,000 of them in 9 shards."""
    folder = tmp_path / "in"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", TEXTS[:200])
    write_jsonl(folder / "b.jsonl.gz", TEXTS[200:])
    return PrepareConfig(
        inputs=(str(folder),),
        out=str(tmp_path / "out"),
        name="t",
        tokenizer="bytes",
        shard_tokens=50_000,
        val_share=0.1,
        workers=1,
    )


def files(config: PrepareConfig) -> dict[str, str]:
    """Every file of the output with its hash."""
    return {path.name: blake2b_of(path) for path in sorted(Path(config.out).iterdir())}


def side_text(config: PrepareConfig, side: str) -> list[str]:
    """The documents of one side, decoded from its shards."""
    folder = Path(config.out)
    tokenizer = load_tokenizer(folder, "")
    paths = sorted(folder.glob(f"*_{side}_*.bin"))
    tokens = np.concatenate([open_shard(path).tokens for path in paths])
    assert tokens[0] == tokenizer.end_of_text
    starts = np.flatnonzero(tokens == tokenizer.end_of_text)
    return [tokenizer.decode_bytes(part[1:].tolist()).decode() for part in np.split(tokens, starts[1:])]


def test_the_shards_hold_every_document_once_in_order(config: PrepareConfig) -> None:
    manifest = prepare(config)
    assert manifest.split
    assert manifest.split.cut is None
    share = manifest.split.share
    sides = {
        side: [text for text in TEXTS if choose_side(split_number(text.encode()), share) == side]
        for side in ("train", "val")
    }
    assert 0.075 < len("".join(sides["val"]).encode()) / manifest.text_bytes < 0.125
    assert side_text(config, "train") == sides["train"]
    assert side_text(config, "val") == sides["val"]
    assert manifest.complete
    assert manifest.documents == len(TEXTS)
    assert manifest.text_bytes == sum(len(text.encode()) for text in TEXTS)
    assert manifest.tokens == manifest.text_bytes + len(TEXTS)
    assert verify(Path(config.out)).ok


def test_names_and_sizes_of_shards(config: PrepareConfig) -> None:
    manifest = prepare(config)
    train = [shard for shard in manifest.shards if shard.side == "train"]
    assert [shard.file for shard in train[:2]] == ["t_train_000001.bin", "t_train_000002.bin"]
    assert [shard.tokens for shard in train[:-1]] == [50_000] * (len(train) - 1)
    assert 0 < train[-1].tokens <= 50_000
    assert next(shard.file for shard in manifest.shards if shard.side == "val") == "t_val_000000.bin"
    for shard in manifest.shards:
        found = open_shard(Path(config.out) / shard.file)
        assert shard.documents == len(positions_of(found, 256))
    assert read_dataset(Path(config.out)) == manifest


@pytest.mark.parametrize("tokenizer", ["bpe-280", "folder"])
def test_other_tokenizers_give_the_text_back(config: PrepareConfig, tmp_path: Path, tokenizer: str) -> None:
    TOKENIZERS["bpe-280"].save(tmp_path)
    chosen = str(tmp_path) if tokenizer == "folder" else tokenizer
    config = replace(config, tokenizer=chosen, shard_tokens=20_000)
    manifest = prepare(config)
    assert sorted(side_text(config, "train") + side_text(config, "val")) == sorted(TEXTS)
    assert manifest.tokenizer.name == "bpe-280"
    same = manifest.tokenizer.fingerprint == TOKENIZERS["bpe-280"].fingerprint
    assert same == (tokenizer == "folder")


def test_a_trained_tokenizer_does_not_see_the_validation_text(config: PrepareConfig, tmp_path: Path) -> None:
    """The merges of a text that goes to validation must not be learnt."""
    candidates = (f"{'xyzzy' * 200} {number}" for number in range(1000))
    secret = next(text for text in candidates if choose_side(split_number(text.encode()), 0.1) == "val")
    path = write_jsonl(tmp_path / "secret.jsonl", [*TEXTS, secret])
    config = replace(config, inputs=(str(path),), tokenizer="bpe-400")
    prepare(config)
    assert not any(b"xyz" in token for token in load_tokenizer(config.out, "").token_bytes)
    assert secret in side_text(config, "val")


def test_the_number_of_processes_changes_nothing(config: PrepareConfig, tmp_path: Path) -> None:
    prepare(config)
    several = replace(config, workers=2, out=str(tmp_path / "several"))
    prepare(several)
    assert files(several) == files(config)


def few_texts(config: PrepareConfig, tmp_path: Path, texts: list[str]) -> PrepareConfig:
    """A folder with a file for each text, none of which the default share would give to validation."""
    folder = tmp_path / "few"
    folder.mkdir()
    for number, text in enumerate(texts):
        assert choose_side(split_number(text.encode()), 0.005) == "train"
        (folder / f"{number:02d}.txt").write_bytes(text.encode())
    return replace(config, inputs=(str(folder),), val_share=0.005, shard_tokens=8_000)


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe-280"])
def test_a_few_files_leave_some_for_validation(config: PrepareConfig, tmp_path: Path, tokenizer: str) -> None:
    """Those whose hashes are lowest, until they have 4 KiB."""
    texts = [f"{number} {text}" for number, text in enumerate(TEXTS[:17])]
    config = replace(few_texts(config, tmp_path, texts), tokenizer=tokenizer)
    manifest = prepare(config)
    train, val = side_text(config, "train"), side_text(config, "val")
    assert sorted(train + val) == sorted(texts)
    assert max(split_number(text.encode()) for text in val) < min(split_number(text.encode()) for text in train)
    sizes = sorted(len(text.encode()) for text in val)
    assert sum(sizes) >= 4096 > sum(sizes) - sizes[-1]
    assert manifest.options.val_share == 0.005
    assert verify(Path(config.out)).ok
    assert prepare(config) == manifest


def test_neither_processes_nor_the_order_of_files_change_what_validates(config: PrepareConfig, tmp_path: Path) -> None:
    config = few_texts(config, tmp_path, texts := [f"{number} {text}" for number, text in enumerate(TEXTS[:17])])
    prepare(config)
    several = replace(config, workers=2, out=str(tmp_path / "several"))
    prepare(several)
    assert files(several) == files(config)
    backwards = replace(config, out=str(tmp_path / "backwards"))
    backwards = replace(backwards, inputs=(str(write_jsonl(tmp_path / "backwards.jsonl", texts[::-1])),))
    prepare(backwards)
    assert sorted(side_text(backwards, "val")) == sorted(side_text(config, "val"))


def test_a_few_files_ended_at_any_write_and_continued_give_the_same(config: PrepareConfig, tmp_path: Path) -> None:
    config = few_texts(config, tmp_path, [f"{number} {text}" for number, text in enumerate(TEXTS[:17])])
    assert len(prepare(config).shards) > 3
    config, expected = replace(config, out=str(tmp_path / "ended")), files(config)
    for attempt in range(100):
        with contextlib.suppress(KilledError), ended_at_rename(1 + attempt % 7, after=True):
            prepare(config)
            break
    assert attempt > 2
    assert files(config) == expected


def test_files_that_would_change_what_validates_are_refused_half_way(config: PrepareConfig, tmp_path: Path) -> None:
    """Else the result would depend on where the first run stopped."""
    config = few_texts(config, tmp_path, [f"{number} {text}" for number, text in enumerate(TEXTS[:17])])
    unfinished(config, shards=1)
    (tmp_path / "few" / "99.txt").write_text("added " * 500_000)
    with pytest.raises(DataError, match=r"the input has changed, other documents.*--overwrite"):
        prepare(config)


@pytest.mark.parametrize(
    ("texts", "share", "in_val"),
    [
        (["one", "two"], 0.005, 1),
        (["one", "two", "three", "four", "five"], 0.005, 3),  # of 10 bytes 5.5 at most, by the lowest hashes
        (["one"], 0.005, 0),
        (["one", "one", "one"], 0.005, 0),  # equal texts stay together, and training needs one
        (["one", "", ""], 0.005, 0),  # a text without text validates nothing
        (["one", "two"], 0.0, 0),  # none was asked for
    ],
)
def test_how_many_of_very_few_texts_validate(
    texts: list[str], share: float, in_val: int, config: PrepareConfig, tmp_path: Path
) -> None:
    path = write_jsonl(tmp_path / "few.jsonl", texts)
    manifest = prepare(replace(config, inputs=(str(path),), val_share=share))
    assert sum(shard.documents for shard in manifest.shards if shard.side == "val") == in_val
    assert manifest.documents == len(texts)


def test_one_long_document_fills_many_chunks(
    config: PrepareConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.text.sources.cut_text.__defaults__", (3000, 6000))
    path = tmp_path / "book.txt"
    path.write_bytes("\r\n".join(TEXTS).encode())
    config = replace(config, inputs=(str(path),), tokenizer="bpe-280", shard_tokens=10_000)
    manifest = prepare(config)
    assert manifest.progress.chunks > 50
    assert ["".join(side_text(config, side)) for side in ("train", "val")] == list(cut_at_last_tenth(path))


def cut_at_last_tenth(path: Path) -> tuple[str, str]:
    content = path.read_bytes()
    cut = content.index(b"\n", int(len(content) * 0.9)) + 1
    return content[:cut].decode(), content[cut:].decode()


def test_standard_input_is_a_document_or_lines(config: PrepareConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, content, expected in (
        ("text", b"one\ntwo\n", ["one\ntwo\n"]),
        ("jsonl", b'{"text": "one"}\n{"text": "two"}\n', ["one", "two"]),
    ):
        with stdin_of(content):
            given = replace(config, inputs=("-",), stdin_format=kind, out=config.out + kind, val_share=0.0)
            prepare(given)
        assert side_text(given, "train") == expected


@contextlib.contextmanager
def stdin_of(content: bytes) -> Iterator[None]:
    """Standard input as a pipe that holds `content`."""
    reading, writing = os.pipe()
    os.write(writing, content)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", pipe)
        yield


def test_a_trained_tokenizer_cannot_be_had_from_standard_input(config: PrepareConfig) -> None:
    with pytest.raises(ConfigError, match="read only once"):
        prepare(replace(config, inputs=("-",), tokenizer="bpe-280"))


def test_progress_is_reported_up_to_the_end(config: PrepareConfig) -> None:
    seen: list[Status] = []
    manifest = prepare(config, seen.append)
    total = sum(path.stat().st_size for path in Path(config.inputs[0]).iterdir())
    assert all(status.bytes_total == total for status in seen)
    assert [status.tokens for status in seen] == sorted(status.tokens for status in seen)
    assert seen[-1].tokens == manifest.tokens
    assert seen[-1].bytes_read == total


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_progress_is_seen_inside_a_long_document(tmp_path: Path, name: str, small_chunks: None) -> None:
    path = write_jsonl(tmp_path / name, ["word " * 100_000])
    seen: list[Status] = []
    options = {"out": str(tmp_path / "out"), "tokenizer": "bytes", "val_share": 0.0}
    prepare(PrepareConfig(inputs=(str(path),), **options), seen.append)  # type: ignore[arg-type]
    assert all(status.bytes_read == path.stat().st_size for status in seen)


class KilledError(BaseException):
    """Stands for the end of the process at a chosen place."""


@contextlib.contextmanager
def ended_at_rename(count: int, *, after: bool) -> Iterator[None]:
    """Raise at the `count`-th rename, before or after it is done. Every file we write appears by a rename."""
    done = 0
    rename = os.replace

    def replace_or_end(source: Path, target: Path) -> None:
        nonlocal done
        done += 1
        if done == count and not after:
            raise KilledError
        rename(source, target)
        if done == count:
            raise KilledError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", replace_or_end)
        yield


@pytest.mark.parametrize("after", [False, True])
def test_ending_at_any_write_and_continuing_gives_the_same_files(
    config: PrepareConfig, tmp_path: Path, after: bool
) -> None:
    """Runs end at their 1st, 2nd … 6th write, over and over; the last five writes must come in one run."""
    prepare(config)
    expected = files(config)
    config = replace(config, out=str(tmp_path / "ended"))
    for attempt in range(200):
        with contextlib.suppress(KilledError), ended_at_rename(1 + attempt % 6, after=after):
            prepare(config)
            break
        whole = [path.name for path in Path(config.out).glob("*.bin")]
        assert all(blake2b_of(Path(config.out) / name) == expected[name] for name in whole)
    assert attempt > 5
    assert files(config) == expected


def test_a_full_disk_is_told_and_costs_only_the_unfinished_shard(config: PrepareConfig, tmp_path: Path) -> None:
    prepare(config)
    full = replace(config, out=str(tmp_path / "full"), workers=2)
    room = [9]

    def write_or_fail(file: int) -> None:
        room[0] -= 1
        if room[0] == 0:
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", write_or_fail)
        with pytest.raises(PacelineError, match=r"--out .*No space left.*continue") as caught:
            prepare(full)
    assert caught.value.exit_code == 1
    assert list(Path(full.out).glob("*.bin"))
    prepare(full)
    assert files(full) == files(config)


def test_finished_shards_are_not_encoded_again(config: PrepareConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.suppress(KilledError), ended_at_rename(2 + 3 * 6, after=True):  # tokenizer, manifest, six shards
        prepare(config)
    done = read_dataset(Path(config.out))
    assert done is not None
    assert len(done.shards) == 6
    encoded = count_encoded_bytes(monkeypatch)
    total = prepare(config).tokens
    finished_train = sum(shard.tokens for shard in done.shards if shard.side == "train")
    assert encoded[0] <= total - finished_train + 2 * module.CHUNK_BYTES
    assert prepare(config).complete
    assert encoded[0] <= total - finished_train + 2 * module.CHUNK_BYTES  # nothing at all when all is done


def count_encoded_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    from paceline.text.tokenizer import ByteTokenizer

    counted = [0]
    encode = ByteTokenizer.encode_array

    def counting(self: ByteTokenizer, text: str) -> np.ndarray:
        counted[0] += len(text.encode())
        return encode(self, text)

    monkeypatch.setattr(ByteTokenizer, "encode_array", counting)
    return counted


def unfinished(config: PrepareConfig, shards: int = 4) -> DatasetManifest:
    """Leave `config` with so many shards done."""
    with contextlib.suppress(KilledError), ended_at_rename(2 + 3 * shards, after=True):
        prepare(config)
    manifest = read_dataset(Path(config.out))
    assert manifest is not None
    assert not manifest.complete
    return manifest


@pytest.mark.parametrize("finished", [False, True])
@pytest.mark.parametrize("change", ["edit", "shorten", "add before", "more validation"])
def test_a_changed_input_is_refused(config: PrepareConfig, finished: bool, change: str) -> None:
    if finished:
        prepare(config)
    else:
        unfinished(config)
    folder = Path(config.inputs[0])
    before = files(config)
    if change == "edit":
        write_jsonl(folder / "a.jsonl", ["X" + TEXTS[0][1:], *TEXTS[1:200]])
    elif change == "shorten":
        write_jsonl(folder / "a.jsonl", TEXTS[:20])
        write_jsonl(folder / "b.jsonl.gz", [])
    elif change == "add before":
        write_jsonl(folder / "0.jsonl", ["first of all"])
    else:  # fills a shard of validation before the place where the change could be noticed by its hash
        candidates = ("validate " * 1000 + str(number) for number in range(1000))
        chosen = [text for text in candidates if choose_side(split_number(text.encode()), 0.1) == "val"]
        write_jsonl(folder / "a.jsonl", [*chosen[:8], *TEXTS[:200]])
    with pytest.raises(DataError, match=r"the input has changed.*--overwrite"):
        prepare(config)
    assert files(config) == before


@pytest.mark.parametrize("chunk_bytes", [1, 4096])  # the last chunk is always full, or takes up what was added
def test_input_that_grew_after_the_end_is_refused_and_overwrite_begins_again(
    config: PrepareConfig, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int
) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", chunk_bytes)
    prepare(config)
    write_jsonl(Path(config.inputs[0]) / "c.jsonl", TEXTS[:50])
    with pytest.raises(DataError, match="the input has changed"):
        prepare(config)
    again = prepare(replace(config, overwrite=True))
    assert again.documents == len(TEXTS) + 50
    assert sorted(side_text(config, "train") + side_text(config, "val")) == sorted(TEXTS + TEXTS[:50])


def test_input_mended_beyond_what_was_consumed_is_welcome(config: PrepareConfig, tmp_path: Path) -> None:
    """A bad line stops the run; what was written stays, and after mending the line the run goes on from there. Without
    validation the input is not looked at beforehand."""
    config = replace(config, val_share=0.0)
    folder = Path(config.inputs[0])
    (folder / "c.jsonl").write_text('{"text": "half')
    with pytest.raises(DataError, match=r"c\.jsonl, line 1: not JSON"):
        prepare(config)
    kept = {name: found for name, found in files(config).items() if name.endswith(".bin")}
    assert len(kept) >= 5
    write_jsonl(folder / "c.jsonl", ["whole"])
    prepare(config)
    assert kept.items() <= files(config).items()
    fresh = replace(config, out=str(tmp_path / "fresh"))
    prepare(fresh)
    assert files(fresh) == files(config)


def test_skipped_records_are_counted(config: PrepareConfig) -> None:
    (Path(config.inputs[0]) / "c.jsonl").write_text('{"text": "half\n{"text": "whole"}\n[]\n')
    manifest = prepare(replace(config, skip_bad=True))
    assert (manifest.skipped, manifest.documents) == (2, len(TEXTS) + 1)


@pytest.mark.parametrize(
    ("change", "flag"),
    [
        ({"shard_tokens": 60_000}, "--shard-tokens 60000.*50000"),
        ({"tokenizer": "bpe-280"}, "--tokenizer bpe-280.*bytes"),
        ({"val_share": 0.2}, "--val-share 0.2.*0.1"),
        ({"name": "u"}, "--name u"),
    ],
)
def test_changed_options_are_refused(config: PrepareConfig, change: dict[str, object], flag: str) -> None:
    unfinished(config)
    with pytest.raises(ConfigError, match=flag):
        prepare(replace(config, **change))  # type: ignore[arg-type]


@pytest.mark.parametrize("writes", [2, 4, 5])  # all that precedes a shard, a shard, its manifest; the dataset's is next
def test_options_may_change_until_a_shard_is_finished(config: PrepareConfig, tmp_path: Path, writes: int) -> None:
    with contextlib.suppress(KilledError), ended_at_rename(writes, after=writes < 5):
        prepare(config)
    assert (Path(config.out) / "dataset.json").exists()
    changed = replace(config, name="u", tokenizer="bpe-280", shard_tokens=20_000, val_share=0.2, skip_bad=True)
    prepare(changed)
    fresh = replace(changed, out=str(tmp_path / "fresh"))
    prepare(fresh)
    assert files(changed) == files(fresh)


def test_the_advice_to_skip_bad_records_can_be_followed(config: PrepareConfig) -> None:
    config = replace(config, shard_tokens=10**6)  # so that the bad record comes before the first shard
    (Path(config.inputs[0]) / "c.jsonl").write_text('{"text": "half')
    with pytest.raises(DataError, match="--skip-bad"):
        prepare(config)
    assert prepare(replace(config, skip_bad=True)).skipped == 1


def test_another_text_for_the_tokenizer_is_refused(config: PrepareConfig) -> None:
    config = replace(config, tokenizer="bpe-280", shard_tokens=20_000, val_share=0.0)
    unfinished(config, shards=1)
    write_jsonl(Path(config.inputs[0]) / "b.jsonl.gz", TEXTS[:100])  # not consumed yet, but trained on
    with pytest.raises(DataError, match="tokenizer was trained on has changed"):
        prepare(config)


@pytest.mark.parametrize("damage", ["flip", "delete"])
def test_a_shard_damaged_in_between_is_named(config: PrepareConfig, damage: str) -> None:
    manifest = unfinished(config)
    path = Path(config.out) / manifest.shards[1].file
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.unlink() if damage == "delete" else path.write_bytes(content)
    with pytest.raises(DataError, match=manifest.shards[1].file):
        prepare(config)


def test_shards_of_somebody_else_are_not_touched(config: PrepareConfig) -> None:
    Path(config.out).mkdir()
    stranger = Path(config.out) / "t_train_000001.bin"
    stranger.write_bytes(b"precious")
    with pytest.raises(DataError, match=r"t_train_000001\.bin: there already"):
        prepare(config)
    assert stranger.read_bytes() == b"precious"


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "card.json"])
def test_the_folder_of_a_run_or_a_model_is_not_touched(config: PrepareConfig, name: str, overwrite: bool) -> None:
    folder = Path(config.out)
    folder.mkdir()
    for file in (name, ".half.tmp"):
        (folder / file).write_bytes(b"precious")
    with pytest.raises(DataError, match=rf"{name}: there already.*another --out"):
        prepare(replace(config, overwrite=overwrite))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == dict.fromkeys(
        (name, ".half.tmp"), b"precious"
    )


def test_a_damaged_manifest_is_refused_until_overwritten(config: PrepareConfig) -> None:
    prepare(config)
    (Path(config.out) / "dataset.json").write_text("{")
    with pytest.raises(DataError, match=r"dataset\.json.*--overwrite"):
        prepare(config)
    assert prepare(replace(config, overwrite=True)).complete


def test_what_a_killed_run_left_half_written_is_cleared_away(config: PrepareConfig) -> None:
    Path(config.out).mkdir()
    (Path(config.out) / ".t_train_000001.bin.123.tmp").write_bytes(b"half")
    prepare(config)
    assert not list(Path(config.out).glob(".*"))


def test_a_second_writer_is_refused(config: PrepareConfig) -> None:
    with only_writer(Path(config.out)), pytest.raises(DataError, match="another process"):
        prepare(config)


def test_an_input_without_documents_is_refused(config: PrepareConfig, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(DataError, match=r"empty\.jsonl: no documents"):
        prepare(replace(config, inputs=(str(tmp_path / "empty.jsonl"),)))


@pytest.mark.parametrize(
    ("change", "flag"),
    [
        ({"inputs": ()}, "no input"),
        ({"shard_tokens": 0}, "--shard-tokens 0"),
        ({"shard_tokens": 2**31}, "--shard-tokens 2147483648"),
        ({"val_share": 1.0}, "--val-share 1.0"),
        ({"workers": 0}, "--workers 0"),
        ({"name": "a/b"}, "--name 'a/b'"),
    ],
)
def test_impossible_options_are_refused(change: dict[str, object], flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        PrepareConfig(**({"inputs": ("x",), "out": "y"} | change))  # type: ignore[arg-type]


CHILD = """
import sys
from paceline.text import prepare
from paceline.text.config import PrepareConfig
from paceline.text.continuation import only_writer
prepare.CHUNK_BYTES = 1 << 16
prepare.prepare(PrepareConfig(inputs=(sys.argv[1],), out=sys.argv[2], tokenizer=sys.argv[3], shard_tokens=50_000,
                              val_share=0.1, workers=2))
"""


def start_child(path: Path, out: Path, tokenizer: Path) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-c", CHILD, str(path), str(out), str(tokenizer)], start_new_session=True)


def kill_and_continue(tmp_path: Path, kills: int, seed: int) -> None:
    """Each run is killed at a random moment after one to three shards more, the last is let finish."""
    path = write_jsonl(tmp_path / "x.jsonl", some_texts(2000, seed=1))
    TOKENIZERS["bpe-280"].save(tmp_path)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert start_child(path, whole, tmp_path).wait() == 0
    draw, in_time = random.Random(seed), 0
    for _ in range(kills):
        wanted = len(list(killed.glob("*.bin"))) + draw.randint(1, 3)
        child = start_child(path, killed, tmp_path)
        while len(list(killed.glob("*.bin"))) < wanted and child.poll() is None:
            time.sleep(0.002)
        time.sleep(draw.uniform(0, 0.05))
        child.kill()
        in_time += child.wait() == -signal.SIGKILL
        assert wait_for_the_end_of(child.pid), "a worker outlived its parent"
    assert start_child(path, killed, tmp_path).wait() == 0
    hashes = [{found.name: blake2b_of(found) for found in folder.iterdir()} for folder in (whole, killed)]
    assert in_time >= kills // 2  # a fast machine may finish before its turn to be killed
    assert hashes[0] == hashes[1]


def wait_for_the_end_of(session: int, timeout_s: float = 5.0) -> bool:
    """Whether every process of the session ends in time; workers notice the death of their parent by themselves."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            os.killpg(session, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.02)
    os.killpg(session, signal.SIGKILL)
    return False


@pytest.mark.journey
def test_killed_runs_continue_to_the_same_files(tmp_path: Path) -> None:
    kill_and_continue(tmp_path, kills=2, seed=0)


@pytest.mark.slow
def test_ten_kills_change_nothing(tmp_path: Path) -> None:
    kill_and_continue(tmp_path, kills=10, seed=1)


def test_the_manifest_says_no_time_and_no_place(config: PrepareConfig, tmp_path: Path) -> None:
    """Equal data have equal manifests, wherever and whenever they were made."""
    prepare(config)
    text = (Path(config.out) / "dataset.json").read_text()
    assert str(tmp_path) not in text
    assert json.loads(text)["sources"] == [
        {"name": path.name, "bytes": path.stat().st_size} for path in sorted(Path(config.inputs[0]).iterdir())
    ]
