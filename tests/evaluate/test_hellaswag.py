"""HellaSwag: what is read from the file, how endings are weighed, and files that are damaged. That the figures are
those of lm-evaluation-harness is proved in test_harness.py."""

import json
from pathlib import Path

import pytest
import torch

from model.small import small
from paceline.core.errors import DataError
from paceline.evaluate.hellaswag import Question, judge_hellaswag, read_hellaswag
from paceline.evaluate.score import silent
from paceline.model.gpt import GPT
from paceline.text.tokenizer import ByteTokenizer

SCENE = {
    "activity_label": "Cooking",
    "ctx_a": "A man [step] stands in a kitchen.",
    "ctx_b": "the man",
    "endings": ["cuts.", "sings a very long song [title] to nobody  at all.", "sleeps well.", "walks away."],
    "label": 0,
}


def written(folder: Path, *lines: object) -> Path:
    path = folder / "hellaswag_val.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_a_question_is_read_as_the_harness_words_it(tmp_path: Path) -> None:
    [found] = read_hellaswag(written(tmp_path, {**SCENE, "label": "1"}))
    assert found.context == "Cooking: A man stands in a kitchen. The man"
    assert found.endings[1] == "sings a very long song. to nobody at all."
    assert found.label == 1


def test_the_limit_takes_the_first_questions(tmp_path: Path) -> None:
    path = written(tmp_path, *({**SCENE, "label": label} for label in (0, 1, 2)))
    assert [question.label for question in read_hellaswag(path, limit=2)] == [0, 1]


def test_a_line_may_hold_other_separators(tmp_path: Path) -> None:
    """JSON allows them, and some tools write them as they are."""
    path = tmp_path / "h.jsonl"
    path.write_text(json.dumps({**SCENE, "ctx_a": "a\u2028b\x85c"}, ensure_ascii=False) + "\n", "utf-8")
    assert len(read_hellaswag(path)) == 1


def judged(label: int) -> tuple[float, float]:
    """By a model to which all tokens are equally likely, with bytes as tokens: an ending costs its length and 1 for the
    space before it, so the shortest is likeliest, and the longest is likeliest per character."""
    tokenizer = ByteTokenizer()
    model = GPT(small("r18-softcap"), end_of_text=tokenizer.end_of_text)
    with torch.no_grad():
        model.head.zero_()
    question = Question("Once", ("ab", "abcdef", "abc", "abcd"), label)
    found = judge_hellaswag(model, tokenizer, [question] * 5, windows=(128,), most_tokens=64, progress=silent)
    return found["acc"], found["acc_norm"]


@pytest.mark.parametrize(("label", "expected"), [(0, (1.0, 0.0)), (1, (0.0, 1.0)), (2, (0.0, 0.0))])
def test_acc_takes_the_likeliest_ending_and_acc_norm_the_likeliest_per_character(
    label: int, expected: tuple[float, float]
) -> None:
    assert judged(label) == expected


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"label": 0, "endings": [', "line 2: not a question"),
        ("[]", "line 2: not a question"),
        ({**SCENE, "label": ""}, "line 2: not a question"),
        ({**SCENE, "label": 4}, "label 4 is none of the endings"),
        ({**SCENE, "endings": ["a", "b"]}, "endings are not 4"),
        ({**SCENE, "endings": ["a", "b", "c", 4]}, "line 2: not a question"),
        ({**SCENE, "endings": ["a", "b", "c", "[x]"]}, "an ending is empty"),
        ({key: value for key, value in SCENE.items() if key != "ctx_b"}, "'ctx_b' is missing"),
        ({**SCENE, "ctx_b": None}, "line 2: not a question"),
    ],
)
def test_a_damaged_file_is_named_with_its_line(line: object, complaint: str, tmp_path: Path) -> None:
    path = written(tmp_path, SCENE, line)
    with pytest.raises(DataError, match=complaint) as caught:
        read_hellaswag(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "complaint"), [(b"", "no question"), (b"\xff\xfe", "not UTF-8"), (None, "cannot be read")]
)
def test_a_file_that_holds_no_questions_is_named(content: bytes | None, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "hellaswag_val.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=complaint):
        read_hellaswag(path)
