"""Documents inside a text are parted where the separator is, however the text was read."""

import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.commands.data import remarks
from paceline.core.errors import ConfigError
from paceline.text import separator as module
from paceline.text.config import PrepareConfig
from paceline.text.manifest import ValSplit
from paceline.text.prepare import prepare
from paceline.text.separator import compile_separator, split_documents
from paceline.text.sources import Reader, find_sources
from text.test_formats import PACK


def documents(text: str, separator: str, block: int = 1 << 20) -> list[str]:
    blocks = (text[at : at + block] for at in range(0, len(text), block))
    return ["".join(parts) for parts in split_documents(blocks, compile_separator(separator))]


@pytest.mark.parametrize(
    ("separator", "text", "expected"),
    [
        ("<|endoftext|>", "one<|endoftext|>two<|endoftext|>", ["one", "two"]),
        ("<|endoftext|>", "one\n<|endoftext|>\ntwo\n<|endoftext|>\n", ["one\n", "two\n"]),
        ("%", "50% off\n%\ntwo %\n%\r\nthree\n%", ["50% off\n", "two %\n", "three\n"]),  # a file of fortune
        ("---", "a---b\n---\nc", ["a---b\n", "c"]),
        ("blank-lines", "one\nline\n\n \t\n\ntwo\r\n\r\nthree\n", ["one\nline", "two", "three\n"]),
        (r"\n\n", "one\n\ntwo\nlines", ["one", "two\nlines"]),
        (r"\f", "page\fpage", ["page", "page"]),
        ("re:(?=^Chapter )", "Chapter 1\nx\nChapter 2\ny", ["Chapter 1\nx\n", "Chapter 2\ny"]),
        ("re:^=+$\n?", "a\n====\nb = c\n=\nd", ["a\n", "b = c\n", "d"]),
        ("re:(?<=[.])\n", "one.\ntwo\nthree.\n", ["one.", "two\nthree."]),
        ("日本", "a日本b", ["a", "b"]),
        ("###", "no separator", ["no separator"]),
    ],
)
@pytest.mark.parametrize("block", [1, 3, 1000])
def test_documents_part_at_the_separator(
    separator: str, text: str, expected: list[str], block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LONGEST_CHARS", 20)
    assert documents(text, separator, block) == expected


@given(
    text=st.text("ab%\n-", max_size=300),
    block=st.integers(1, 50),
    separator=st.sampled_from(["%", "ab", "blank-lines", "re:(?<=a)b+", "re:^a", "re:-$", r"re:(?!b)\n"]),
)
def test_how_the_text_was_read_changes_nothing(text: str, block: int, separator: str) -> None:
    """Up to a separator, or what one looks at, of LONGEST_CHARS."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "LONGEST_CHARS", 300)
        assert documents(text, separator, block) == documents(text, separator)
        patch.setattr(module, "LONGEST_CHARS", 30)
        patch.setattr(module, "BEHIND_CHARS", 2)
        if not re.search(r"\n{25}|b{25}|%{25}", text):
            assert documents(text, separator, block) == documents(text, separator)


def test_a_long_text_is_held_only_as_far_as_a_separator_may_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LONGEST_CHARS", 100)
    blocks = ("x" * 999 + "\n" for _ in range(1_000))
    sizes = [len(part) for part in next(split_documents(blocks, compile_separator("%")))]
    assert (sum(sizes), max(sizes)) == (1_000_000, 1_000)


def test_a_separator_without_end_is_taken_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LONGEST_CHARS", 100)
    assert documents("one" + "\n" * 5_000 + "two", "blank-lines", 64) == ["one", "two"]


@pytest.mark.parametrize("separator", ["", "re:", "re:x*", "re:(", "re:^|x"])
def test_a_separator_that_cannot_be_is_refused(separator: str) -> None:
    with pytest.raises(ConfigError, match="--document-separator"):
        PrepareConfig(inputs=("x",), out="y", document_separator=separator)


@pytest.mark.parametrize("packing", ["", *PACK])
def test_a_text_with_separators_becomes_documents_without_blank_ones(tmp_path: Path, packing: str) -> None:
    path = tmp_path / f"x.txt{packing}"
    path.write_bytes(PACK.get(packing, bytes)(b"\n<|endoftext|>\none\n<|endoftext|>\n  \n<|endoftext|>two"))
    reader = Reader("text", separator=compile_separator("<|endoftext|>"))
    found = list(reader.pieces(find_sources([str(path)], "text"), ValSplit(share=0.0)))
    assert [(piece.text, piece.opens) for piece in found] == [(b"one\n", True), (b"two", True)]


def test_the_documents_of_one_file_are_split_by_the_bytes(tmp_path: Path) -> None:
    draw = random.Random(0)
    stories = [f"story {n} " + "word " * draw.randrange(20, 400) for n in range(500)]
    (tmp_path / "stories.txt").write_text("\n<|endoftext|>\n".join(stories))
    manifest = prepare(
        PrepareConfig(
            inputs=(str(tmp_path / "stories.txt"),), out=str(tmp_path / "out"), tokenizer="bytes", val_share=0.05,
            document_separator="<|endoftext|>",
        )
    )  # fmt: skip
    assert manifest.documents in (500, 501)
    assert manifest.side_tokens("val") / manifest.tokens == pytest.approx(0.05, rel=0.26)


def test_a_separator_that_is_not_found_is_said(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("one\ntwo\n" * 1_000)
    config = PrepareConfig(
        inputs=(str(tmp_path / "x.txt"),), out=str(tmp_path / "out"), tokenizer="bytes", document_separator="##"
    )
    assert any("'##': not found" in line for line in remarks(prepare(config)))
    (tmp_path / "x.txt").write_text("one\ntwo\n##\n" * 1_000)
    assert not any("not found" in line for line in remarks(prepare(replace(config, overwrite=True))))
