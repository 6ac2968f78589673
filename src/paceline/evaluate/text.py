"""Bits per byte of a text that the user has: the one figure that compares models with different tokenizers.

A text is one document, opened by end-of-text, read in sequences that overlap: each is as long as those of training,
and counts only the half that no earlier one has counted. So all of the text counts once, and past the first sequence
every token has at least half a sequence before it. That costs twice the passes of sequences side by side.
"""

import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from paceline.core.errors import DataError
from paceline.core.files import new_digest
from paceline.evaluate.positions import LossByPlace, Rows
from paceline.evaluate.score import Progress, Row, score_rows, silent
from paceline.evaluate.validation import Validation
from paceline.model.gpt import GPT
from paceline.model.masks import Windows
from paceline.text.sources import PIECE_CHARS, cut_text
from paceline.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class TextFile:
    path: Path
    text: str
    bytes: int
    blake2b: str


@dataclass(frozen=True, kw_only=True)
class TextResult(Validation):
    positions: Rows


def read_text(path: Path) -> TextFile:
    text = read_utf8("--text", path)
    if not text:
        raise DataError(f"--text {path}: empty, so there is nothing to predict; give a file with text")
    content, digest = text.encode(), new_digest()
    digest.update(content)
    return TextFile(path, text, len(content), digest.hexdigest())


def read_utf8(flag: str, path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise DataError(f"{flag} {path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{flag} {path}: byte {error.start:,} is not UTF-8; convert the file first") from None


def rolling_rows(stream: Sequence[int], most_tokens: int, *, overlap: int) -> Iterator[Row]:
    """Every token of `stream` but the first, counted once, in rows that give the model at most `most_tokens`. Past the
    first row, a token has at least `overlap` + 1 before it. (An overlap of 0 is lm-evaluation-harness's way.)"""
    counted, stop = 1, min(len(stream), most_tokens + 1)
    while counted < len(stream):
        start = max(0, stop - most_tokens - 1)
        yield Row(stream[start:stop], counted - start)
        counted, stop = stop, min(len(stream), stop + most_tokens - overlap)


def judge_text(
    model: GPT, tokenizer: Tokenizer, file: TextFile, *, windows: Windows, most_tokens: int, progress: Progress = silent
) -> TextResult:
    rows = list(rolling_rows(_stream(tokenizer, file.text), most_tokens, overlap=most_tokens // 2))
    scores = score_rows(model, rows, windows=windows, progress=progress)
    losses = torch.from_numpy(np.concatenate([score.losses for score in scores]))
    by_place = LossByPlace(losses.numel(), max(windows, default=None), losses.device, sequence=most_tokens)
    by_place.add(losses, torch.arange(losses.numel()))
    nats, tokens = float(losses.sum(dtype=torch.float64)), losses.numel()
    bits = nats / math.log(2)
    return TextResult(loss=nats / tokens, bits_per_byte=bits / file.bytes, tokens=tokens, positions=by_place.rows())


def _stream(tokenizer: Tokenizer, text: str) -> Sequence[int]:
    """End-of-text and the ids of `text`, two bytes each. Encoded in pieces, because a tokenizer needs many times the
    memory of what it is given at once."""
    blocks = (text[start : start + PIECE_CHARS] for start in range(0, len(text), PIECE_CHARS))
    ids = array("H", [tokenizer.end_of_text])
    for piece in cut_text(blocks):
        ids.extend(tokenizer.encode(piece))
    return ids
