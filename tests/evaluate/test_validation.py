"""Validation: the mean over tokens, bits per byte from the text's length, no autograd."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.data.batches import Batch
from paceline.evaluate.validation import validate
from paceline.model.loss import Losses

LENGTHS = np.array([0, 1, 2, 5])  # bytes of each token id; 0 is end-of-text


def batch(targets: list[list[int]]) -> Batch:
    array = np.array(targets, dtype=np.int64)
    return Batch(tokens=array.astype(np.int32), targets=array)


def loss_is_target(tokens: Tensor, targets: Tensor, windows: Tensor) -> Losses:
    assert not torch.is_grad_enabled()
    return Losses(targets.float() * windows)


def test_the_loss_is_the_mean_over_tokens_of_unequal_batches() -> None:
    found = validate(loss_is_target, [batch([[1, 2], [3, 0]]), batch([[3, 3]])], torch.tensor([2]), LENGTHS)
    assert found.tokens == 6
    assert found.loss == pytest.approx(2 * (1 + 2 + 3 + 0 + 3 + 3) / 6)


def test_bits_per_byte_divide_by_the_text_not_by_tokens() -> None:
    found = validate(loss_is_target, [batch([[1, 2, 3, 0]])], torch.tensor([1]), LENGTHS)
    assert found.bits_per_byte == pytest.approx(6 / math.log(2) / 8)


def test_without_a_tokenizer_there_are_no_bits_per_byte() -> None:
    assert validate(loss_is_target, [batch([[1]])], torch.tensor([1]), None).bits_per_byte is None
