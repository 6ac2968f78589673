"""Text is shown as soon as it may be, in whole characters, and ends before a stop string."""

from hypothesis import given
from hypothesis import strategies as st

from paceline.evaluate.generate import TextStream
from paceline.text.tokenizer import ByteTokenizer

BYTES = ByteTokenizer()


def shown(text: bytes, *stops: str) -> tuple[list[str], bool]:
    stream = TextStream(BYTES, stops)
    pieces = [stream.push(token) for token in text]
    return [*pieces, stream.end()], stream.stopped


def cut(text: str, stops: list[str]) -> str:
    """The definition: read on, character by character, until a stop is complete."""
    for end in range(len(text) + 1):
        found = [text[:end].find(stop) for stop in stops if stop in text[:end]]
        if found:
            return text[: min(found)]
    return text


@given(st.text(alphabet="abé€", max_size=30), st.lists(st.text(alphabet="abé€", min_size=1, max_size=4), max_size=4))
def test_the_pieces_are_the_text_up_to_the_first_stop(text: str, stops: list[str]) -> None:
    pieces, stopped = shown(text.encode(), *stops)
    assert "".join(pieces) == cut(text, stops)
    assert stopped == any(stop in text for stop in stops)


def test_nothing_is_held_back_that_cannot_become_a_stop() -> None:
    assert shown(b"abcabd", "abd")[0] == ["", "", "abc", "", "", "", ""]
    assert shown(b"xy", "abd")[0] == ["x", "y", ""]
    assert shown(b"xab", "abd")[0] == ["x", "", "", "ab"]  # the end shows what was held


def test_a_character_waits_for_its_bytes_and_broken_ones_are_marked() -> None:
    assert shown("é".encode())[0] == ["", "é", ""]
    assert "".join(shown(b"a\xe2\x82")[0]) == "a\ufffd"
