"""Bits per byte: every byte once, by a known distribution, and as one whole pass where the text fits into one."""

import math
import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from model.small import shaken, small
from paceline.core.errors import DataError
from paceline.evaluate.score import Score, score_pass
from paceline.evaluate.text import judge_text, read_text, rolling_rows
from paceline.model.gpt import GPT
from paceline.text.tokenizer import ByteTokenizer, Tokenizer

TEXT = "Ein Satz, naïve café, and <|endoftext|> spelled out.\r\n" * 6


def text_file(folder: Path, text: str = TEXT) -> Path:
    path = folder / "text.txt"
    path.write_bytes(text.encode())
    return path


@given(length=st.integers(1, 200), most=st.integers(2, 50), data=st.data())
def test_every_token_but_the_first_counts_once_with_as_much_before_it_as_promised(
    length: int, most: int, data: st.DataObject
) -> None:
    overlap = data.draw(st.integers(0, most - 1))
    stream = list(range(length))
    counted = []
    for row in rolling_rows(stream, most, overlap=overlap):
        assert len(row.ids) - 1 <= most
        counted += row.ids[row.counted_from :]
        before = row.ids[: row.counted_from]
        assert before[-1] + 1 == row.ids[row.counted_from]
        assert before[0] == 0 or len(before) >= overlap + 1
    assert counted == stream[1:]


def test_an_even_guess_costs_the_log_of_the_vocabulary_per_token(tmp_path: Path, tokenizer: Tokenizer) -> None:
    config = small("r18-softcap", vocab_size=tokenizer.vocab_size)
    model = GPT(config, end_of_text=tokenizer.end_of_text)
    with torch.no_grad():
        model.head.zero_()
    file = read_text(text_file(tmp_path))
    found = judge_text(model, tokenizer, file, windows=(128,), most_tokens=32)
    assert found.tokens == len(tokenizer.encode(TEXT))
    assert found.loss == pytest.approx(math.log(config.lm_head_rows))
    assert found.bits_per_byte == pytest.approx(found.tokens * math.log2(config.lm_head_rows) / len(TEXT.encode()))


def test_a_text_that_fits_is_one_document_in_one_pass(tmp_path: Path) -> None:
    tokenizer = ByteTokenizer()
    model = shaken(small("r18-softcap"))
    found = judge_text(model, tokenizer, read_text(text_file(tmp_path)), windows=(128,), most_tokens=1024)
    ids = torch.tensor([[tokenizer.end_of_text, *TEXT.encode()]])
    with torch.no_grad():
        whole = model(ids[:, :-1], ids[:, 1:], torch.tensor([128])).main
    assert found.loss == pytest.approx(float(whole.mean()), rel=1e-5)
    beyond = [row for row in found.positions if not row[2]]
    assert beyond[0][:4] == (128, 255, False, 128)
    assert beyond[0][4] == pytest.approx(float(whole[0, 128:256].mean()), rel=1e-5)


def test_shorter_sequences_leave_the_count_of_tokens_and_the_places_as_they_are(tmp_path: Path) -> None:
    file, model, tokenizer = read_text(text_file(tmp_path)), shaken(small("r18-softcap")), ByteTokenizer()
    long, short = (judge_text(model, tokenizer, file, windows=(128,), most_tokens=most) for most in (1024, 64))
    assert long.tokens == short.tokens == len(TEXT.encode())
    assert [(row[:2], row[3]) for row in long.positions] == [(row[:2], row[3]) for row in short.positions]
    assert [row[0] for row in short.positions if row[2]] == [0, 16, 32]  # further on the start was not given
    assert long.positions[0] == pytest.approx(short.positions[0])  # the first sequence is the same
    assert long.loss != pytest.approx(short.loss, rel=1e-6)


def test_a_text_in_pieces_has_the_figures_of_the_whole(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tokenizer is never given more than about one piece."""
    file, model = read_text(text_file(tmp_path)), shaken(small("r18-softcap", vocab_size=tokenizer.vocab_size))
    given: list[str] = []
    encode = tokenizer.encode
    monkeypatch.setattr(tokenizer, "encode", lambda text: given.append(text) or encode(text))
    whole, cut = [], []
    for found, size in ((whole, 1 << 20), (cut, 40)):
        monkeypatch.setattr("paceline.evaluate.text.BLOCK_BYTES", size)
        monkeypatch.setattr("paceline.text.sources.cut_text.__defaults__", (size, 2 * size))
        found.append(judge_text(model, tokenizer, file, windows=(128,), most_tokens=64))
    assert given[0] == "".join(given[1:]) == TEXT
    assert len(given) > 6
    assert cut == whole


JUDGE = """
import re, sys
from pathlib import Path
from paceline.evaluate.score import Score, score_pass
from paceline.evaluate.text import judge_text, read_text
from dataclasses import replace
from paceline.model.gpt import GPT
from serving.tiny_server import TOKENIZER, WINDOWS, tiny_model
model = GPT(replace(tiny_model().config, num_layers=1, width=16, num_heads=1), end_of_text=TOKENIZER.end_of_text)
for path in map(Path, sys.argv[1:]):
    found = judge_text(model, TOKENIZER, read_text(path), windows=WINDOWS, most_tokens=128)
    peak = re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]
    print(found.tokens, int(peak) >> 10)
"""


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_memory_does_not_grow_with_the_text(tmp_path: Path) -> None:
    """When rows were kept, it grew by 0.2 to 1.3 GB for each MB."""
    for name, length in (("short", 60_000), ("long", 20_000_000)):
        (tmp_path / name).write_text(("several words of a text. " * (length // 25 + 1))[:length])
    command = [sys.executable, "-c", JUDGE, tmp_path / "short", tmp_path / "long"]
    tests = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    judged = subprocess.run(command, capture_output=True, text=True, check=True, env=tests)
    (_, before_mib), (tokens, after_mib) = (map(int, line.split()) for line in judged.stdout.splitlines())
    assert tokens == 20_000_000
    assert after_mib - before_mib < 128


def test_nothing_is_kept_of_a_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its losses are gone when the next pass begins, and are copies: a view would keep the buffers of the pass."""
    kept: list[weakref.ref[np.ndarray]] = []

    def watched(*given: Any) -> list[Score]:
        assert [one() for one in kept if one() is not None] == []
        scores = score_pass(*given)
        assert all(array.base is None for score in scores for array in (score.losses, score.likeliest))
        kept.extend(weakref.ref(score.losses) for score in scores)
        return scores

    monkeypatch.setattr("paceline.evaluate.text.score_pass", watched)
    monkeypatch.setattr("paceline.evaluate.score.PASS_TOKENS", 64)
    judge_text(
        shaken(small("r18-softcap")), ByteTokenizer(), read_text(text_file(tmp_path)), windows=(128,), most_tokens=16
    )
    assert len(kept) > 30


def test_a_text_may_come_through_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(path := tmp_path / "pipe")
    writer = threading.Thread(target=lambda: path.write_bytes(TEXT.encode()))
    writer.start()
    piped = read_text(path)
    writer.join()
    plain = read_text(text_file(tmp_path))
    assert (piped.bytes, piped.blake2b) == (plain.bytes, plain.blake2b)
    assert "".join(piped.blocks()) == "".join(piped.blocks()) == TEXT


@pytest.mark.parametrize("place", [0, 1, 2, 3, 6, 7])
def test_a_bad_byte_is_named_by_its_place_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    monkeypatch.setattr("paceline.evaluate.text.BLOCK_BYTES", 3)
    content = bytearray("ab€de".encode())
    content[place:place] = b"\xff"
    with pytest.raises(UnicodeDecodeError) as whole:
        bytes(content).decode()
    expected = whole.value.start
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"byte {expected} is not UTF-8"):
        read_text(path)


@pytest.mark.parametrize(
    ("content", "complaint"), [(b"", "empty"), (b"abc\xff", "byte 3 is not UTF-8"), (None, "cannot be read")]
)
def test_a_file_that_is_no_text_is_named(content: bytes | None, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=complaint) as caught:
        read_text(path)
    assert str(path) in str(caught.value)
