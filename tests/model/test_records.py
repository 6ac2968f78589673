"""Every record's forward and backward pass against a second implementation in float64."""

import pytest
import torch
from torch.testing import assert_close

from model import plain
from model.small import END_OF_TEXT, RECORDS, in_fp32, random_tokens, shaken, small, windows
from paceline.model.gpt import GPT

TOKENS = 320  # two blocks and a half, so that windows in tokens, in blocks and in both differ


def number(name: str) -> int:
    return int(name[1:3])


def weights(model: GPT, *, grad: bool = False) -> plain.Weights:
    return {name: value.detach().double().requires_grad_(grad) for name, value in model.named_parameters()}


@torch.no_grad()
@pytest.mark.parametrize("name", RECORDS)
def test_logits_in_the_records_own_formats(name: str) -> None:
    """fp32 products; tables, scalars and frequencies stored as the record stores them."""
    config = small(name)
    length = TOKENS if config.window.unit in ("none", "tokens") else 384
    model, tokens = shaken(config), random_tokens(1, length, document_every=150)
    for window in (192, 256):
        expected = plain.logits(number(name), weights(model), tokens[0], window, end_of_text=END_OF_TEXT, formats=True)
        found = model.logits(tokens, windows(window))[0].double()
        assert_close(found, expected, rtol=0, atol=2e-3)  # a cosine may round to the other bf16 neighbour


@pytest.mark.parametrize("name", RECORDS)
def test_loss_and_every_gradient_in_fp32(name: str) -> None:
    config = in_fp32(small(name))
    model, tokens = shaken(config), random_tokens(2, 256, document_every=90)
    targets = tokens.roll(-1, dims=1)
    window = 192 if config.window.unit != "blocks" else 128
    judge = weights(model, grad=True)
    expected = plain.loss(number(name), judge, tokens, targets, window, end_of_text=END_OF_TEXT)
    expected.backward()
    found = model(tokens, targets, windows(window)).main.mean()
    found.backward()
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    for parameter_name, parameter in model.named_parameters():
        gradient = judge[parameter_name].grad
        assert gradient is not None
        mine = torch.zeros_like(gradient) if parameter.grad is None else parameter.grad.double()
        size = float(gradient.abs().max())
        assert float((mine - gradient).abs().max()) <= 1e-3 * size + 1e-12, parameter_name
