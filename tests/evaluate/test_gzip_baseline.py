"""gzip's bits per byte: of the text that is predicted, and of no more of it than is needed."""

import gzip
from collections.abc import Iterator

import numpy as np
import pytest

from paceline.core.units import IGNORE_TARGET
from paceline.data.corpus import Batch
from paceline.evaluate.validation import TEXT_BYTES, gzip_bits_per_byte
from paceline.text.tokenizer import ByteTokenizer

TEXT = b"the cat sat on the mat. a dog ate the bone. " * 40


def batch(targets: list[int]) -> Batch:
    return Batch(np.zeros((1, len(targets)), dtype=np.int32), np.array([targets], dtype=np.int64))


def test_it_is_the_size_of_the_compressed_text_without_what_is_no_text() -> None:
    ids = [ByteTokenizer.end_of_text, *TEXT, IGNORE_TARGET]
    found = gzip_bits_per_byte([batch(ids[:700]), batch(ids[700:])], ByteTokenizer())
    assert found == pytest.approx(8 * len(gzip.compress(TEXT, 9)) / len(TEXT))


def test_of_a_long_text_only_the_first_is_read() -> None:
    def endless() -> Iterator[Batch]:
        while True:
            yield batch([97] * (TEXT_BYTES // 4))

    found = gzip_bits_per_byte(endless(), ByteTokenizer())
    assert found is not None
    assert 0 < found < 0.1


def test_no_text_has_no_figure() -> None:
    assert gzip_bits_per_byte([batch([ByteTokenizer.end_of_text])], ByteTokenizer()) is None
