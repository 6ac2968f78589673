"""Bits per byte of a text that the user has: the one figure that compares models with different tokenizers.

A text is one document, read in sequences of which each counts only the half that no earlier one has counted. So past
the first every token has at least half a sequence before it, for twice the passes of sequences side by side.
"""

import codecs
import itertools
import math
import shutil
import tempfile
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import torch

from paceline.core.errors import DataError
from paceline.core.files import new_digest
from paceline.evaluate.positions import LossByPlace, Rows
from paceline.evaluate.score import Progress, Row, rows_of_a_pass, score_pass, silent
from paceline.evaluate.validation import Validation
from paceline.model.gpt import GPT
from paceline.model.masks import Windows
from paceline.text.byte_streams import BLOCK_BYTES
from paceline.text.sources import cut_text
from paceline.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class TextFile:
    """Open, and read in blocks as often as it is judged."""

    path: Path
    file: IO[bytes]
    bytes: int
    blake2b: str

    def blocks(self) -> Iterator[str]:
        self.file.seek(0)
        return codecs.iterdecode(iter(lambda: self.file.read(BLOCK_BYTES), b""), "utf-8")


@dataclass(frozen=True, kw_only=True)
class TextResult(Validation):
    positions: Rows


def read_text(path: Path) -> TextFile:
    """Checked from end to end, so that a mistake costs no waiting."""
    try:
        file: IO[bytes] = open(path, "rb")  # noqa: SIM115 (open until all models have judged it)
        if not file.seekable():
            file, pipe = tempfile.TemporaryFile(), file  # noqa: SIM115
            shutil.copyfileobj(pipe, file)
            file.seek(0)
    except OSError as error:
        raise DataError(f"--text {path}: cannot be read ({error.strerror})") from None
    digest, decoder, size, block = new_digest(), codecs.getincrementaldecoder("utf-8")(), 0, b"-"
    while block:
        block = file.read(BLOCK_BYTES)
        digest.update(block)
        size += len(block)
        try:
            decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            at = size - len(error.object) + error.start
            raise DataError(f"--text {path}: byte {at:,} is not UTF-8; convert the file first") from None
    if not size:
        raise DataError(f"--text {path}: empty, so there is nothing to predict; give a file with text")
    return TextFile(path, file, size, digest.hexdigest())


def rolling_rows(stream: Iterable[int], most_tokens: int, *, overlap: int) -> Iterator[Row]:
    """Every token of `stream` but the first, counted once, in rows that give the model at most `most_tokens`. Past the
    first row, a token has at least `overlap` + 1 before it. (An overlap of 0 is lm-evaluation-harness's way.)"""
    ids, held, first = iter(stream), array("q"), 0  # `held`: the stream from `first` on
    counted, stop = 1, most_tokens + 1
    while True:
        held.extend(itertools.islice(ids, stop - first - len(held)))
        stop = first + len(held)
        if stop <= counted:
            return
        start = max(0, stop - most_tokens - 1)
        del held[: start - first]
        first = start
        yield Row(held[:], counted - start)
        counted, stop = stop, stop + most_tokens - overlap


def judge_text(
    model: GPT, tokenizer: Tokenizer, file: TextFile, *, windows: Windows, most_tokens: int, progress: Progress = silent
) -> TextResult:
    """In constant memory: of a pass only sums are kept."""
    nats, tokens, done_bytes, token_bytes = 0.0, 0, 0, tokenizer.token_byte_lengths()
    by_place = LossByPlace(file.bytes, max(windows, default=None), torch.device("cpu"), sequence=most_tokens)
    rows = rolling_rows(_stream(tokenizer, file.blocks()), most_tokens, overlap=most_tokens // 2)
    for batch in iter(lambda: list(itertools.islice(rows, rows_of_a_pass(most_tokens))), []):
        losses = torch.from_numpy(np.concatenate([score.losses for score in score_pass(model, batch, windows)]))
        by_place.add(losses, torch.arange(tokens, tokens + losses.numel()))
        nats += float(losses.sum(dtype=torch.float64))
        tokens += losses.numel()
        done_bytes += sum(int(token_bytes[row.ids[row.counted_from :]].sum()) for row in batch)
        progress(done_bytes, file.bytes)
    bits = nats / math.log(2)
    return TextResult(loss=nats / tokens, bits_per_byte=bits / file.bytes, tokens=tokens, positions=by_place.rows())


def _stream(tokenizer: Tokenizer, blocks: Iterable[str]) -> Iterator[int]:
    """End-of-text and the ids of the text. Encoded in pieces, because a tokenizer needs many times the memory of what
    it is given at once."""
    yield tokenizer.end_of_text
    for piece in cut_text(blocks):
        yield from tokenizer.encode(piece)
