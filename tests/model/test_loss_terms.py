"""Loss terms: the z-loss against float64, how a term reaches the gradient, and that validation leaves it out."""

import importlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from model.small import END_OF_TEXT, in_fp32, random_tokens, shaken, small, windows
from paceline.core.errors import ConfigError
from paceline.data.corpus import Batch
from paceline.evaluate.validation import validate
from paceline.model.gpt import GPT
from paceline.model.loss import IGNORE_TARGET, LossInputs, loss_term
from paceline.model.loss_terms import z_loss
from paceline.settings.model import LossTerm, ModelConfig
from paceline.train.gradient_step import forward_backward

PLAIN = in_fp32(small("r18-softcap"))
WITH_Z = replace(PLAIN, loss_terms=(LossTerm(name="z_loss", weight=1e-3),))
WINDOW = windows(128)


def inputs(tokens: int, cap: float | None) -> LossInputs:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, 16, generator=generator).requires_grad_()
    head = (0.7 * torch.randn(40, 16, generator=generator)).requires_grad_()
    targets = torch.randint(0, 40, (1, tokens), generator=generator)
    targets[:, 3::7] = IGNORE_TARGET
    return LossInputs(x, head, targets, targets, cap)


def judged(given: LossInputs) -> list[Tensor]:
    """Total and gradients of x and head, in float64, token by token."""
    x, head = (part.detach().double().requires_grad_() for part in (given.x, given.head))
    total = torch.zeros((), dtype=torch.float64)
    for row, target in zip(x, given.targets.flatten().tolist(), strict=True):
        z = head @ row if given.cap is None else given.cap * torch.tanh(head @ row / given.cap)
        total = total + (z.exp().sum().log() ** 2 if target != IGNORE_TARGET else 0 * z.sum())
    return [total.detach(), *torch.autograd.grad(total, (x, head))]


@pytest.mark.parametrize("cap", [None, 15.0, 2.0])
@pytest.mark.parametrize("tokens", [1, 4, 5, 6, 23])  # below, at and past one chunk; a ragged last one
def test_the_z_loss_and_its_gradients_are_the_formula(
    tokens: int, cap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(z_loss, "CHUNK_TOKENS", 5)
    given = inputs(tokens, cap)
    total = z_loss.total(given)
    assert total.dtype == torch.float32
    found = [total.detach(), *torch.autograd.grad(total, (given.x, given.head))]
    for mine, exact in zip(found, judged(given), strict=True):
        assert_close(mine.double(), exact, rtol=1e-5, atol=1e-5 * float(exact.abs().max()))  # fp32 sums of 40 terms


def test_a_target_that_does_not_count_adds_nothing_to_the_z_loss() -> None:
    given = inputs(23, 15.0)
    (grad,) = torch.autograd.grad(z_loss.total(given), given.x)
    ignored = given.targets.flatten() == IGNORE_TARGET
    assert ignored.any()
    assert not grad[ignored].any()
    assert grad[~ignored].any(dim=-1).all()


def sample(seed: int = 0) -> tuple[Tensor, Tensor]:
    tokens = random_tokens(2, 128, seed=seed)
    targets = tokens.roll(-1, dims=1)
    targets[:, ::9] = IGNORE_TARGET
    return tokens, targets


def gradients(config: ModelConfig, *weights: float) -> tuple[Tensor, dict[str, Tensor]]:
    """The mean losses of one batch, and what a training step leaves in every `.grad`."""
    model, (tokens, targets) = shaken(config), sample()
    losses = forward_backward(model, tokens, targets, WINDOW, torch.tensor(weights), 100)
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == dict(model.named_parameters()).keys()
    return losses, found


def test_a_model_gives_the_term_of_its_own_logits_beside_its_main_loss() -> None:
    model, (tokens, targets) = shaken(WITH_Z), sample()
    with torch.no_grad():
        main, (term,) = model(tokens, targets, WINDOW)
        log_z = model.logits(tokens, WINDOW).double().logsumexp(-1)
    assert float(term) == pytest.approx(float((log_z**2)[targets != IGNORE_TARGET].sum()), rel=1e-5)
    assert torch.equal(main, shaken(PLAIN)(tokens, targets, WINDOW).main)
    assert shaken(PLAIN)(tokens, targets, WINDOW).terms == ()


def test_a_weight_of_zero_leaves_the_gradient_of_a_model_without_the_term() -> None:
    (losses, found), (plain, expected) = gradients(WITH_Z, 0.0), gradients(PLAIN)
    assert torch.equal(losses[:1], plain)
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name


def test_a_term_adds_its_gradient_times_its_weight() -> None:
    """Main and term one by one, then added by hand."""
    model, (tokens, targets) = shaken(WITH_Z), sample()
    losses = model(tokens, targets, WINDOW)
    params = dict(model.named_parameters())
    totals = (losses.main.sum(), *losses.terms)
    parts = [torch.autograd.grad(total / 100, params.values(), retain_graph=True) for total in totals]
    means, found = gradients(WITH_Z, 0.25)
    assert means.tolist() == pytest.approx([total.item() / 100 for total in totals], rel=1e-6)
    for name, main, term in zip(params, *parts, strict=True):
        size = float(main.abs().max() + term.abs().max())
        assert float((found[name] - main - 0.25 * term).abs().max()) <= 1e-5 * size, name  # another order of fp32 sums
    assert all(bool(term.any()) for term in parts[1]), "the term reaches every parameter"


def test_terms_come_in_the_order_of_the_config_each_with_its_own_weight() -> None:
    twice = replace(PLAIN, loss_terms=(LossTerm(name="z_loss", weight=1.0), LossTerm(name="z_loss", weight=2.0)))
    losses, found = gradients(twice, 0.25, 0.5)
    once_losses, once = gradients(WITH_Z, 0.75)
    assert losses.tolist() == [*once_losses.tolist(), once_losses[1].item()]
    for name, gradient in once.items():
        assert_close(found[name], gradient, rtol=1e-4, atol=1e-5 * float(gradient.abs().max()))


def test_validation_reads_the_main_loss_only() -> None:
    tokens, targets = sample()
    batch = Batch(tokens=tokens.numpy(), targets=targets.numpy())
    results = [validate(shaken(config), [batch], WINDOW, np.ones(300)) for config in (WITH_Z, PLAIN)]
    assert results[0] == results[1]
    assert results[0] is not None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("y_loss", "model.loss_terms: there is no loss term 'y_loss'; it would be model/loss_terms/y_loss.py"),
        ("z-loss", "model.loss_terms: 'z-loss' is no loss term's name"),
        ("..os", "model.loss_terms: '..os' is no loss term's name"),
    ],
)
def test_a_term_that_does_not_exist_is_refused_in_one_line_when_the_model_is_built(name: str, message: str) -> None:
    config = replace(PLAIN, loss_terms=(LossTerm(name=name, weight=1.0),))
    with pytest.raises(ConfigError) as refused:
        GPT(config, end_of_text=END_OF_TEXT)
    assert str(refused.value) == message


def test_a_term_is_a_module_with_a_function_called_total() -> None:
    assert loss_term("z_loss") is importlib.import_module("paceline.model.loss_terms.z_loss").total


def test_a_compiled_model_gives_the_same_term() -> None:
    torch._dynamo.reset()
    model, (tokens, targets) = (
        shaken(replace(WITH_Z, num_layers=2, value_ends=1, layers_without_attention=())),
        sample(),
    )
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=False)
    found, expected = compiled(tokens, targets, WINDOW), model(tokens, targets, WINDOW)
    assert_close(found.terms[0], expected.terms[0], rtol=1e-5, atol=0)
    params = list(model.parameters())
    for mine, theirs in zip(
        *(torch.autograd.grad(losses.terms[0], params) for losses in (found, expected)), strict=True
    ):
        assert_close(mine, theirs, rtol=1e-4, atol=1e-5 * float(theirs.abs().max()))
