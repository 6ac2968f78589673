"""HellaSwag from a file: four endings of a scene, of which the model should find the true one likeliest.

Prompts and scores are those of lm-evaluation-harness, so that the figures compare with published ones: `acc` takes the
ending with the largest log probability, `acc_norm` divides it by the ending's length in characters first. (Scripts that
divide by tokens instead give other figures.)
"""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paceline.core.errors import DataError
from paceline.evaluate.score import Progress, cut_to, pair_row, score_rows
from paceline.model.gpt import GPT
from paceline.model.masks import Windows
from paceline.text.tokenizer import Tokenizer

ENDINGS = 4


@dataclass(frozen=True)
class Question:
    context: str
    endings: tuple[str, ...]
    label: int


def read_hellaswag(path: Path, limit: int | None = None) -> list[Question]:
    """The first `limit` questions of a file of JSON lines, as HellaSwag is published."""
    try:
        lines = path.read_bytes().decode("utf-8").split("\n")  # not splitlines: JSON allows its other separators
    except OSError as error:
        raise DataError(f"--hellaswag {path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise DataError(f"--hellaswag {path}: byte {error.start:,} is not UTF-8; convert the file first") from None
    questions = [_question(path, number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not questions:
        raise DataError(f"--hellaswag {path}: holds no question; give hellaswag_val.jsonl")
    return questions[:limit]


def _question(path: Path, number: int, line: str) -> Question:
    try:
        found = json.loads(line)
        label, endings = int(found["label"]), found["endings"]
        if not isinstance(endings, list) or len(endings) != ENDINGS:
            raise ValueError(f"endings are not {ENDINGS}")
        if not 0 <= label < ENDINGS:
            raise ValueError(f"label {label} is none of the endings")
        scene = f"{found['activity_label']}: {found['ctx_a']} {found['ctx_b'].capitalize()}"
        question = Question(_clean(scene), tuple(_clean(ending) for ending in endings), label)
        if not all(question.endings):
            raise ValueError("an ending is empty")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else error
        raise DataError(f"--hellaswag {path}, line {number}: not a question ({reason}); the file is damaged") from None
    return question


def _clean(text: str) -> str:
    """Without the marks of the how-to pages that half of the scenes come from."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


def judge_hellaswag(
    model: GPT,
    tokenizer: Tokenizer,
    questions: list[Question],
    *,
    windows: Windows,
    most_tokens: int,
    progress: Progress,
) -> dict[str, float | None]:
    """The figures by the harness's names; no standard error of a single question."""
    pairs = [(question.context, f" {ending}") for question in questions for ending in question.endings]
    rows = [cut_to(pair_row(tokenizer, *pair), most_tokens) for pair in pairs]
    scores = score_rows(model, rows, windows=windows, progress=progress)
    losses = np.reshape([score.nats for score in scores], (-1, ENDINGS))
    lengths = np.array([[len(ending) for ending in question.endings] for question in questions])
    labels = np.array([question.label for question in questions])
    figures: dict[str, float | None] = {}
    for name, weighed in (("acc", losses), ("acc_norm", losses / lengths)):
        share, count = float((weighed.argmin(axis=1) == labels).mean()), len(questions)
        figures[name] = share
        figures[f"{name}_stderr"] = math.sqrt(share * (1 - share) / (count - 1)) if count > 1 else None
    return figures
