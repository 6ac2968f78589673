"""HellaSwag from a file: four endings of a scene, of which the model should find the true one likeliest.

Prompts and scores are those of lm-evaluation-harness, so that the figures compare with published ones: `acc` takes the
ending with the largest log probability, `acc_norm` divides it by the ending's length in characters first, because long
endings are less likely. (Scripts that divide by tokens instead give other figures.) A test proves them equal to the
harness's through our adapter.
"""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.core.errors import DataError
from paceline.data.tokenizer import Tokenizer
from paceline.evaluate.score import Progress, cut_to, pair_row, score_rows
from paceline.model.gpt import GPT

ENDINGS = 4


@dataclass(frozen=True)
class Question:
    context: str
    endings: tuple[str, ...]
    label: int


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    acc: float
    acc_stderr: float | None
    acc_norm: float
    acc_norm_stderr: float | None


def read_hellaswag(path: Path, limit: int | None = None) -> list[Question]:
    """The first `limit` questions of a file of JSON lines, as HellaSwag is published."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # not splitlines: JSON allows its other separators
    except OSError as error:
        raise DataError(f"--hellaswag {path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise DataError(f"--hellaswag {path}: not UTF-8; the file is damaged or something else") from None
    questions = [_question(path, number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not questions:
        raise DataError(f"--hellaswag {path}: holds no question; give hellaswag_val.jsonl")
    return questions[:limit]


def _question(path: Path, number: int, line: str) -> Question:
    try:
        return _parsed(json.loads(line))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else error
        raise DataError(f"--hellaswag {path}, line {number}: not a question ({reason}); the file is damaged") from None


def _parsed(found: Any) -> Question:
    """Raises one of the errors above on anything else than a question with its answer."""
    label, endings = int(found["label"]), found["endings"]
    if not isinstance(endings, list) or len(endings) != ENDINGS:
        raise ValueError(f"endings are not {ENDINGS}")
    if not 0 <= label < ENDINGS:
        raise ValueError(f"label {label} is none of the endings")
    scene = f"{found['activity_label']}: {found['ctx_a']} {found['ctx_b'].capitalize()}"
    question = Question(_clean(scene), tuple(_clean(ending) for ending in endings), label)
    if not all(question.endings):
        raise ValueError("an ending is empty")
    return question


def _clean(text: str) -> str:
    """Without the marks of the how-to pages that half of the scenes come from."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


def judge_hellaswag(
    model: GPT,
    tokenizer: Tokenizer,
    questions: Sequence[Question],
    *,
    window: int,
    most_tokens: int,
    progress: Progress = lambda done, total: None,
) -> Accuracy:
    rows = [
        cut_to(pair_row(tokenizer, question.context, f" {ending}"), most_tokens)
        for question in questions
        for ending in question.endings
    ]
    nats = [score.nats for score in score_rows(model, rows, window=window, progress=progress)]
    plain, normalised = 0, 0
    for number, question in enumerate(questions):
        losses = nats[ENDINGS * number : ENDINGS * (number + 1)]
        per_letter = [loss / len(ending) for loss, ending in zip(losses, question.endings, strict=True)]
        plain += losses.index(min(losses)) == question.label
        normalised += per_letter.index(min(per_letter)) == question.label
    acc, acc_norm, count = plain / len(questions), normalised / len(questions), len(questions)
    return Accuracy(
        acc=acc, acc_stderr=_stderr(acc, count), acc_norm=acc_norm, acc_norm_stderr=_stderr(acc_norm, count)
    )


def _stderr(share: float, count: int) -> float | None:
    """Of a share of `count` yes-or-no answers; None from a single one."""
    return math.sqrt(share * (1 - share) / (count - 1)) if count > 1 else None
