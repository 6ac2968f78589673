"""Validation gets its share of the bytes, whatever the files' sizes, and equal texts stay together."""

import gzip
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.files import blake2b_of
from paceline.text import split as module
from paceline.text.config import PrepareConfig
from paceline.text.manifest import DatasetManifest, ValSplit, read_dataset
from paceline.text.prepare import prepare
from paceline.text.split import Sides, choose_side, plan_split
from paceline.text.verify import verify


def part_of_val(split: ValSplit, documents: list[tuple[int, int]]) -> float:
    """Of the bytes, as `Sides` gives them."""
    val = sum(size for number, size in documents if choose_side(number, split.share) == "val")
    val += sum(size - split.cut_at for number, size in documents if f"{number:016x}" == split.cut)
    return val / sum(size for _, size in documents)


SIZES = st.one_of(st.integers(600, 2_000), st.integers(600, 10_000_000))
NOTES = st.sampled_from([0, 0, 0, 600])
"""Small documents before the others."""


@given(st.lists(SIZES, min_size=1, max_size=40), NOTES, st.sampled_from([0.005, 0.05, 0.3]), st.integers(0, 10**6))
def test_validation_has_its_share_of_the_bytes_whatever_the_sizes(
    sizes: list[int], notes: int, share: float, seed: int
) -> None:
    draw = random.Random(seed)
    sizes = [1_000] * notes + sizes
    documents = [(draw.getrandbits(64), size) for size in sizes]
    wanted = min(max(share, 4096 / sum(sizes)), 0.5)
    assert part_of_val(plan_split(documents, share), documents) == pytest.approx(wanted, rel=0.26)


@given(st.lists(SIZES, min_size=2, max_size=20), NOTES, st.sampled_from([50, 10**6]), st.integers(0, 10**6))
def test_the_order_of_documents_means_nothing(sizes: list[int], notes: int, held: int, seed: int) -> None:
    draw = random.Random(seed)
    documents = [(draw.getrandbits(64), size) for size in [1_000] * notes + sizes]
    documents += documents[:20]  # what there is twice counts twice
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MOST_HELD", held)
        split = plan_split(documents, 0.05)
        draw.shuffle(documents)
        assert plan_split(documents, 0.05) == split


@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_a_large_document_after_many_small_ones_counts(tmp_path: Path, kind: str) -> None:
    """Of 1,200 notes alone the hash gives the share; a large file after them made validation a tenth of it."""
    draw = random.Random(0)
    texts = ["".join(draw.choices("abc ", k=100)) for _ in range(1_200)] + ["word and word \n" * 50_000]
    manifests = []
    for name, inputs in (("last", texts), ("first", texts[::-1])):
        folder = tmp_path / name
        folder.mkdir()
        if kind == "jsonl":
            (folder / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in inputs))
        else:
            for number, text in enumerate(inputs):
                (folder / f"{number:04d}.txt").write_text(text)
        config = PrepareConfig(
            inputs=(str(folder),), out=str(tmp_path / "out" / name), tokenizer="bytes", val_share=0.05
        )
        manifests.append(prepare(config))
    assert [each.side_tokens("val") / each.tokens for each in manifests] == [pytest.approx(0.05, rel=0.26)] * 2
    assert manifests[0].split == manifests[1].split


def test_where_no_line_is_large_records_are_not_read_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("documents are measured")

    monkeypatch.setattr("paceline.text.continuation.plan_split", refuse)
    lines = [json.dumps({"text": f"note {number} " * 20}) for number in range(1_500)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines[:700]) + "\n")
    (tmp_path / "b.jsonl").write_text("\n".join(lines[700:]))
    inputs = (str(tmp_path / "b.jsonl"), str(tmp_path / "a.jsonl"))
    manifest = prepare(PrepareConfig(inputs=inputs, out=str(tmp_path / "out"), tokenizer="bytes", val_share=0.05))
    assert manifest.split == ValSplit(share=0.05)
    assert manifest.side_tokens("val") / manifest.tokens == pytest.approx(0.05, rel=0.3)


def test_of_a_stream_that_is_fetched_few_documents_are_measured() -> None:
    draw, measured = random.Random(0), 0

    def endless() -> Iterator[tuple[int, int]]:
        nonlocal measured
        while True:
            measured += 1
            yield draw.getrandbits(64), draw.randrange(1_000, 9_000)

    assert plan_split(endless(), 0.05, until_enough=True) == ValSplit(share=0.05)
    assert measured < 3_000


@pytest.mark.parametrize("share", [0.01, 0.3])
def test_of_many_documents_the_sizes_of_the_larger_ones_are_held(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    monkeypatch.setattr(module, "MOST_HELD", 100)
    draw = random.Random(0)
    documents = [(draw.getrandbits(64), 10_000_000), *((draw.getrandbits(64), 10_000) for _ in range(1_000))]
    split = plan_split(documents, share)
    assert part_of_val(split, documents) == pytest.approx(share, rel=0.26)


@given(st.text("ab \n日", min_size=600, max_size=3_000), st.integers(1, 2_000), st.integers(1, 500))
def test_a_document_that_is_cut_stays_whole_text(text: str, at: int, size: int) -> None:
    """Both parts are characters, in order, and the place does not depend on what was read at once before it."""
    encoded = text.encode()
    at = min(at, len(encoded) - 1)
    number = module.split_number(encoded)
    parts = Sides(ValSplit(share=0.0, cut=f"{number:016x}", cut_at=at, cut_bytes=size), None).of(encoded)
    assert b"".join(part for _, part in parts) == encoded
    assert all(part.decode() for _, part in parts)
    assert [side for side, _ in parts] in (["train", "val"], ["train"])


def write_files(folder: Path, sizes: list[int]) -> Path:
    folder.mkdir()
    draw = random.Random(0)
    for number, size in enumerate(sizes):
        words = " ".join(draw.choices(("some", "words", "of\n", "text", "naïve"), k=size // 5))
        (folder / f"{number:02d}.txt").write_text(f"{number} {words}", encoding="utf-8")
    return folder


@pytest.mark.parametrize("sizes", [[2_000_000] + [20_000] * 9, [300_000] * 3, [5_000] * 400, [900_000]])
@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_five_percent_is_about_five_percent_of_the_tokens(tmp_path: Path, sizes: list[int], kind: str) -> None:
    """Of ten files of which one holds nearly all, by the number of documents it was none or nearly all."""
    folder = write_files(tmp_path / "in", sizes)
    if kind == "jsonl":
        lines = [json.dumps({"text": path.read_text(encoding="utf-8")}) for path in sorted(folder.iterdir())]
        folder = tmp_path / "in.jsonl"
        folder.write_text("\n".join(lines))
    config = PrepareConfig(inputs=(str(folder),), out=str(tmp_path / "out"), tokenizer="bytes", val_share=0.05)
    manifest = prepare(config)
    assert manifest.side_tokens("val") / manifest.tokens == pytest.approx(0.05, rel=0.26)
    assert verify(tmp_path / "out").ok
    assert prepare(config) == manifest


def lone_text(tmp_path: Path, content: bytes, **options: Any) -> DatasetManifest:
    (tmp_path / "a.txt").write_bytes(content)
    return prepare(PrepareConfig(inputs=(str(tmp_path / "a.txt"),), out=str(tmp_path / "out"), **options))


@pytest.mark.parametrize("line", [b"some words to read\n", b"some words and no end of a line, " * 200 + b"\n"])
@pytest.mark.parametrize(("size", "val"), [(104_000, 4096), (30_000, 4096), (6_000, 3_000), (2_000_000, 10_000)])
def test_of_a_single_text_4_kib_validate_as_far_as_that_is_not_more_than_half(
    tmp_path: Path, line: bytes, size: int, val: int
) -> None:
    manifest = lone_text(tmp_path, (line * (size // len(line) + 1))[:size], tokenizer="bytes")
    assert manifest.side_tokens("val") == pytest.approx(val, rel=0.26)


def test_of_a_single_text_bad_lines_do_not_count(tmp_path: Path) -> None:
    """The last 5 % of the file are bad lines, of which validation would have nothing."""
    content = b"a good line of text\n" * 4_000 + b"a bad \xff line\n" * 400
    manifest = lone_text(tmp_path, content, tokenizer="bytes", val_share=0.05, skip_bad=True)
    assert manifest.skipped_lines == 400
    assert manifest.side_tokens("val") / manifest.tokens == pytest.approx(0.05, rel=0.26)


# ---- what older versions prepared


BEFORE = Path(__file__).parent / "prepared_before"
"""Left unfinished by the version before `DatasetManifest.split`: two of five shards."""
FINISHED = {  # by that version, of the same input
    "t_train_000001.bin": "518346da4887e7f71a0f5ed22c1f68f7",
    "t_train_000002.bin": "3242a890d3f4e66837fca4b98d9d03dd",
    "t_train_000003.bin": "b0b42cd6c2e4bbc5688bc6f3f1d56d4a",
    "t_train_000004.bin": "563cf13959152605def3f75dc2ffff5c",
    "t_val_000000.bin": "950e5014c2038662819c301728cec113",
}


def write_old_input(folder: Path) -> None:
    """A whole text, one with a bad line, which was left out whole, records, and files of kinds that were not read."""
    folder.mkdir()
    (folder / "a.txt").write_text("a whole text\n" * 20)
    (folder / "b.txt").write_bytes(b"good line\n" * 9 + b"bad \xff line\n" + b"good line\n" * 9)
    lines = [json.dumps({"text": f"document {n} " + "word " * (n % 23)}) for n in range(40)]
    lines.insert(7, '{"text": "half')
    (folder / "c.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "d.txt.gz").write_bytes(gzip.compress(b"not read then"))
    (folder / "e.csv").write_text("text\nnor this\n")


def test_a_preparation_that_an_older_version_began_is_continued_by_its_rules(tmp_path: Path) -> None:
    write_old_input(tmp_path / "in")
    out = tmp_path / "out"
    out.mkdir()
    for path in BEFORE.iterdir():
        (out / path.name).write_bytes(path.read_bytes())
    config = PrepareConfig(
        inputs=(str(tmp_path / "in"),), out=str(out), name="t", tokenizer="bytes", shard_tokens=600, val_share=0.2,
        skip_bad=True, workers=1,
    )  # fmt: skip
    manifest = prepare(config)
    assert {shard.file: shard.blake2b for shard in manifest.shards} == FINISHED
    assert (manifest.documents, manifest.skipped, manifest.split) == (41, 2, None)
    assert verify(out).ok
    before = {path.name: blake2b_of(path) for path in out.iterdir()}
    assert prepare(config) == manifest  # finished, it is found all done
    assert {path.name: blake2b_of(path) for path in out.iterdir()} == before
    again = prepare(replace(config, overwrite=True))  # begun anew, the new rules hold
    assert again.split is not None
    assert (again.skipped, again.skipped_lines) == (1, 1)
    assert read_dataset(out) == again
