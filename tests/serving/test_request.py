"""Whatever a body says, it is a completion or a refusal that names the field."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.evaluate.serving.request import FIELDS, Completion, RefusedError, parse_body, parse_completion
from paceline.text.tokenizer import ByteTokenizer

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=2), max_leaves=5
)


def parsed(**fields: Any) -> Completion:
    return parse_completion(fields, ByteTokenizer(), model="tiny", max_tokens=100, max_choices=4)


@given(st.dictionaries(st.sampled_from(sorted(FIELDS)) | st.text(max_size=5), VALUES, max_size=6))
def test_any_object_is_a_completion_or_refused(fields: dict[str, Any]) -> None:
    found: Completion | RefusedError
    try:
        found = parsed(**fields)
    except RefusedError as refusal:
        found = refusal
    if isinstance(found, Completion):
        assert all(len(prompt) + found.new_tokens <= 100 for prompt in found.prompts)
    else:
        assert found.status in (400, 404)
        assert found.param in fields or found.param in ("prompt", "include_usage")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [1, 257]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"prompt": "x" * 84}, "prompt"),
        ({"prompt": ["a"] * 5}, "prompt"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 16.0}, "max_tokens"),
        ({"prompt": "a", "n": 5}, "n"),
        ({"prompt": "a", "temperature": -0.1}, "temperature"),
        ({"prompt": "a", "temperature": True}, "temperature"),
        ({"prompt": "a", "temperature": 10**400}, "temperature"),
        ({"prompt": "a", "top_p": 0}, "top_p"),
        ({"prompt": "a", "top_k": 0}, "top_k"),
        ({"prompt": "a", "seed": 2**63}, "seed"),
        ({"prompt": "a", "stop": ["a"] * 5}, "stop"),
        ({"prompt": "a", "stop": ""}, "stop"),
        ({"prompt": "a", "stream": 1}, "stream"),
        ({"prompt": "a", "stream_options": {"include_obfuscation": True}}, "stream_options"),
        ({"prompt": "a", "stream_options": []}, "stream_options"),
        ({"prompt": "a", "echo": 1}, "echo"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "logprobs": True}, "logprobs"),
        ({"prompt": "a", "model": "gpt-4"}, "model"),
        ({"prompt": "a", "top_n": 1}, "top_n"),
    ],
)
def test_a_mistake_is_refused_by_its_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RefusedError) as caught:
        parsed(**fields)
    assert caught.value.param == param


def test_what_changes_nothing_may_be_sent() -> None:
    found = parsed(prompt="ab", model="tiny", echo=False, best_of=1, logprobs=None, suffix=None, user="me", seed=7)
    assert (found.prompts, found.new_tokens, found.sampling.seed) == (([256, 97, 98],), 16, 7)


def test_a_prompt_may_be_text_tokens_or_several() -> None:
    assert parsed(prompt=[1, 2]).prompts == ([1, 2],)
    assert parsed(prompt=["a", [5], "b"]).prompts == ([256, 97], [5], [256, 98])


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"a"', b"\xff", b'{"a": NaN}', b"[" * 100_000, b"1" * 5_000])
def test_a_body_that_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(RefusedError, match="body"):
        parse_body(body)
