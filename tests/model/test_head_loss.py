"""Head and loss: the twin against the formula in float64, the chunked form against its twin, around chunk edges."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from model.small import END_OF_TEXT, random_tokens, shaken, small, windows
from paceline.backends.registry import Request, find
from paceline.kernels import head_loss as kernel
from paceline.kernels.head_loss import head_loss_chunked
from paceline.model.gpt import GPT, Seams
from paceline.model.loss import IGNORE_TARGET, HeadLoss, head_loss
from paceline.settings import backends as sizes
from paceline.settings.model import ModelConfig

WIDTH, ROWS = 16, 40
HEAD_LOSSES: dict[str, HeadLoss] = {"reference": head_loss, "chunked": head_loss_chunked}
BOTH = pytest.mark.parametrize("loss", HEAD_LOSSES.values(), ids=HEAD_LOSSES.keys())
CAPS = pytest.mark.parametrize("cap", [None, 15.0, 2.0])


@pytest.fixture(autouse=True)
def _chunks_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that chunks small enough for a test occur."""
    monkeypatch.setattr(sizes, "MIN_CHUNK_TOKENS", 1)


def inputs(tokens: int, *, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, WIDTH, generator=generator).to(dtype).requires_grad_()
    weight = (0.7 * torch.randn(ROWS, WIDTH, generator=generator)).to(dtype).requires_grad_()
    targets = torch.randint(0, ROWS, (tokens,), generator=generator)
    targets[3::7] = IGNORE_TARGET
    return x, weight, targets


def judged(x: Tensor, weight: Tensor, targets: Tensor, cap: float | None, shift: float = 0.0) -> Tensor:
    """-log softmax in float64, token by token; 0 where the target does not count."""
    losses = []
    for row, target in zip(x.double(), targets.tolist(), strict=True):
        z = weight.double() @ row
        z = z if cap is None else cap * torch.tanh((z + shift) / cap)
        losses.append(torch.logsumexp(z, 0) - z[target] if target != IGNORE_TARGET else 0 * z.sum())
    return torch.stack(losses)


def with_gradients(losses: Tensor, *sources: Tensor) -> list[Tensor]:
    weights = torch.linspace(-1, 2, losses.numel(), dtype=losses.dtype)  # every token counts differently
    return [losses.double(), *(grad.double() for grad in torch.autograd.grad(losses, sources, weights))]


@BOTH
@CAPS
@pytest.mark.parametrize("tokens", [1, 4, 5, 6, 23])  # below, at and past one chunk; a ragged last one
def test_loss_and_gradients_are_the_formula(
    loss: HeadLoss, cap: float | None, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizes, "CHUNK_LOGITS", 5 * ROWS)
    x, weight, targets = inputs(tokens)
    expected = with_gradients(judged(x, weight, targets, cap), x, weight)
    assert_close(with_gradients(loss(x, weight, targets, cap, 0.0), x, weight), expected, rtol=1e-4, atol=1e-5)
    shifted = with_gradients(judged(x, weight, targets, cap, 4.0), x, weight)
    assert_close(with_gradients(loss(x, weight, targets, cap, 4.0), x, weight), shifted, rtol=1e-4, atol=1e-5)


@BOTH
def test_the_shifted_cap_is_the_sigmoid_of_the_public_records(loss: HeadLoss) -> None:
    """A softmax of 23 σ((l + 5)/7.5) is one of 11.5 tanh((z + s)/11.5) for z = 11.5/15 l and s = 11.5/15 · 5."""
    x, weight, targets = inputs(23)
    expected = F.cross_entropy(23 * torch.sigmoid(((x @ weight.T) + 5) / 7.5), targets, reduction="none")
    scale = 11.5 / 15
    assert_close(loss(x, scale * weight, targets, 11.5, scale * 5), expected, rtol=1e-4, atol=1e-5)


@BOTH
def test_an_ignored_target_has_no_loss_and_no_gradient(loss: HeadLoss) -> None:
    x, weight, targets = inputs(23)
    losses = loss(x, weight, targets, 15.0, 0.0)
    ignored = targets == IGNORE_TARGET
    assert ignored.any()
    assert not losses[ignored].any()
    assert (losses[~ignored] > 0).all()
    (grad,) = torch.autograd.grad(losses.sum(), x)
    assert not grad[ignored].any()
    assert grad[~ignored].any(dim=-1).all()


@BOTH
def test_the_loss_is_fp32_and_gradients_keep_their_formats(loss: HeadLoss) -> None:
    """Products of bf16 end the process on some CPUs at any real size; at 16 wide they are safe everywhere."""
    x, weight, targets = inputs(6, dtype=torch.bfloat16)
    weight = weight[:16].detach().requires_grad_()
    targets = targets.clamp(max=15)
    losses = loss(x, weight, targets, 15.0, 0.0)
    assert losses.dtype == torch.float32
    grads = torch.autograd.grad(losses.sum(), (x, weight))
    assert [grad.dtype for grad in grads] == [torch.bfloat16, torch.bfloat16]


def test_chunks_never_hold_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    largest = 0
    capped = kernel._capped

    def spy(logits: Tensor, cap: float | None, shift: float) -> Tensor:
        nonlocal largest
        largest = max(largest, logits.numel())
        return capped(logits, cap, shift)

    monkeypatch.setattr(kernel, "_capped", spy)
    monkeypatch.setattr(sizes, "CHUNK_LOGITS", 5 * ROWS)
    x, weight, targets = inputs(23)
    head_loss_chunked(x, weight, targets, None).sum().backward()
    assert largest == 5 * ROWS


def test_a_head_wider_than_a_chunk_goes_token_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "CHUNK_LOGITS", 1)
    x, weight, targets = inputs(5)
    assert_close(head_loss_chunked(x, weight, targets, None), head_loss(x, weight, targets, None))


def test_a_large_vocabulary_does_not_thin_the_products(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = []
    capped = kernel._capped
    monkeypatch.setattr(kernel, "_capped", lambda logits, *of: (lengths.append(len(logits)), capped(logits, *of))[1])
    monkeypatch.setattr(sizes, "CHUNK_LOGITS", 1)
    monkeypatch.setattr(sizes, "MIN_CHUNK_TOKENS", 8)
    head_loss_chunked(*inputs(23), None)
    assert lengths == [8, 8, 7]


def test_padding_rows_take_part_in_the_softmax() -> None:
    x, weight, targets = torch.zeros(1, WIDTH), torch.zeros(ROWS, WIDTH), torch.tensor([3])
    for loss in HEAD_LOSSES.values():
        assert float(loss(x, weight, targets, None)) == pytest.approx(math.log(ROWS), rel=1e-6)


@pytest.mark.parametrize("name", ["r05-modern-arch", "r18-softcap"])  # tied head without a cap, untied with one
def test_a_model_is_the_same_with_either_and_as_its_logits_say(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "CHUNK_LOGITS", 50 * 384)
    one, tokens, window = shaken(small(name)), random_tokens(2, 128), windows(128)
    other = GPT(one.config, end_of_text=END_OF_TEXT, seams=Seams(lm_head=head_loss_chunked))
    other.load_state_dict(one.state_dict())
    targets = tokens.roll(-1, dims=1)
    losses = [model(tokens, targets, window).main for model in (one, other)]
    assert_close(*losses, rtol=1e-5, atol=1e-5)
    logits = one.logits(tokens, window)
    chosen = logits.gather(-1, targets[..., None])[..., 0]
    assert_close(losses[0], logits.logsumexp(-1) - chosen, rtol=1e-5, atol=1e-5)
    for loss in losses:
        loss.mean().backward()
    for (key, mine), theirs in zip(one.named_parameters(), other.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        size = float(mine.grad.abs().max())
        rounding = 2**-7 if mine.dtype == torch.bfloat16 else 1e-4
        assert float((mine.grad.float() - theirs.grad.float()).abs().max()) <= rounding * size, key


def chunked_by(chunk_tokens: int) -> HeadLoss:
    """The back end of that name, cut as --lm-head.chunk-tokens says."""
    request = Request(model=ModelConfig(), device="cpu", compute="fp32", lm_head_chunk_tokens=chunk_tokens)
    loss: HeadLoss = find("lm_head", "chunked").build(request)
    return loss


@pytest.mark.parametrize(
    "chunk_tokens", [1, 5, 23, 100]
)  # a token, a ragged last chunk, one chunk, more than there are
def test_chunks_of_any_length_give_the_same_losses(chunk_tokens: int) -> None:
    x, weight, targets = inputs(23)
    expected = with_gradients(head_loss(x, weight, targets, 15.0, 0.0), x, weight)
    chunked = chunked_by(chunk_tokens)
    assert_close(with_gradients(chunked(x, weight, targets, 15.0), x, weight), expected, rtol=1e-5, atol=1e-6)


def test_a_compiler_takes_all_chunks_as_one_operator() -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    x, weight, targets = inputs(64)
    loss = chunked_by(2)  # 32 chunks
    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, dynamic=False, backend=backend)
    assert_close(compiled(x, weight, targets, 15.0), loss(x, weight, targets, 15.0, 0.0), rtol=0, atol=0)
    assert len(graphs[0].graph.nodes) < 10
