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
from paceline.data.sources import PIECE_CHARS, cut_text
from paceline.data.tokenizer import Tokenizer
from paceline.evaluate.positions import LossByPlace
from paceline.evaluate.score import Progress, Row, Score, score_rows
from paceline.model.gpt import GPT


@dataclass(frozen=True)
class TextFile:
    path: Path
    text: str
    bytes: int
    blake2b: str


@dataclass(frozen=True)
class TextResult:
    loss: float
    """Mean over tokens, in nats."""
    bits_per_byte: float
    tokens: int
    positions: tuple[tuple[int | float | bool | None, ...], ...]


def read_text(path: Path) -> TextFile:
    try:
        content = path.read_bytes()
        text = content.decode("utf-8")
    except OSError as error:
        raise DataError(f"--text {path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise DataError(f"--text {path}: byte {error.start:,} is not UTF-8; convert the file first") from None
    if not content:
        raise DataError(f"--text {path}: empty, so there is nothing to predict; give a file with text")
    digest = new_digest()
    digest.update(content)
    return TextFile(path, text, len(content), digest.hexdigest())


def rolling_rows(stream: Sequence[int], most_tokens: int, *, overlap: int) -> Iterator[Row]:
    """Every token of `stream` but the first, counted once, in rows that give the model at most `most_tokens`. Past the
    first row, a token has at least `overlap` + 1 before it. (An overlap of 0 is lm-evaluation-harness's way.)"""
    counted, stop = 1, min(len(stream), most_tokens + 1)
    while counted < len(stream):
        start = max(0, stop - most_tokens - 1)
        yield Row(stream[start:stop], counted - start)
        counted, stop = stop, min(len(stream), stop + most_tokens - overlap)


def judge_text(
    model: GPT,
    tokenizer: Tokenizer,
    file: TextFile,
    *,
    window: int,
    window_tokens: int | None,
    most_tokens: int,
    progress: Progress = lambda done, total: None,
) -> TextResult:
    """`window` is the mask's; `window_tokens` is None where the model has none."""
    rows = list(rolling_rows(_stream(tokenizer, file.text), most_tokens, overlap=most_tokens // 2))
    losses = _joined(score_rows(model, rows, window=window, progress=progress))
    by_place = LossByPlace(losses.numel(), window_tokens, losses.device)
    by_place.add(losses, torch.arange(losses.numel()))
    nats = float(losses.sum(dtype=torch.float64))
    return TextResult(
        loss=nats / losses.numel(),
        bits_per_byte=nats / math.log(2) / file.bytes,
        tokens=losses.numel(),
        positions=by_place.rows(),
    )


def _stream(tokenizer: Tokenizer, text: str) -> Sequence[int]:
    """End-of-text and the ids of `text`, two bytes each. Encoded in pieces, because a tokenizer needs many times the
    memory of what it is given at once."""
    blocks = (text[start : start + PIECE_CHARS] for start in range(0, len(text), PIECE_CHARS))
    ids = array("H", [tokenizer.end_of_text])
    for piece in cut_text(blocks):
        ids.extend(tokenizer.encode(piece))
    return ids


def _joined(scores: Sequence[Score]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([score.losses for score in scores]))
