"""Adam against torch.optim in fp32 and against float64 in bf16."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis.strategies import floats, integers, lists
from torch import Tensor, nn
from torch.testing import assert_close

from optim.building import float64_iteration
from optim.building import settings as settings_of_step
from optim.oracles import adam_step
from paceline.optim.rule import Event, RuleContext
from paceline.optim.rules.adam import Rule
from paceline.settings.groups import param_groups
from paceline.settings.optim import OptimConfig

LRS = [0.6, 0.3, 0.45, 0.01, 0.2, 0.1]


def seeded(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def of(**params: nn.Parameter) -> Rule:
    group = param_groups(OptimConfig(), ["scalars"])["scalars"]
    return Rule(group, params, RuleContext(orthogonalise=float64_iteration))


def advance(adam: Rule, *, step: int, lr: float, **changes: float) -> None:
    adam.start(Event(settings=settings_of_step(lr, **changes), step=step))()


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("betas", [(0.8, 0.95), (0.9, 0.999)])
@pytest.mark.parametrize("shape", [(), (3,), (37, 5), (64, 64)])
def test_fp32_agrees_with_torch(shape: tuple[int, ...], betas: tuple[float, float], decay: float) -> None:
    ours, theirs = (nn.Parameter(seeded(*shape, seed=0)) for _ in range(2))
    adam = of(w=ours)
    plain = torch.optim.AdamW([theirs], betas=betas, eps=1e-8, weight_decay=decay, foreach=False, fused=False)
    for step, lr in enumerate(LRS, start=1):
        ours.grad = seeded(*shape, seed=step)
        theirs.grad = ours.grad.clone()
        advance(adam, step=step, lr=lr, beta1=betas[0], beta2=betas[1], weight_decay=decay)
        plain.param_groups[0]["lr"] = lr
        plain.step()
    assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_without_decay_it_is_plain_adam() -> None:
    ours, theirs = (nn.Parameter(seeded(20, seed=0)) for _ in range(2))
    adam, plain = of(w=ours), torch.optim.Adam([theirs], lr=0.1, betas=(0.9, 0.95))
    for step in range(1, 5):
        ours.grad = theirs.grad = seeded(20, seed=step)
        advance(adam, step=step, lr=0.1, beta1=0.9)
        plain.step()
    assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@settings(max_examples=40, deadline=None)
@given(
    shape=lists(integers(1, 70), min_size=0, max_size=2),  # around the kernel's vectors of 16 and 32
    step=integers(1, 1000),
    lr=floats(1e-4, 1.0),
    decay=floats(0, 0.5),
    seed=integers(0, 2**31),
)
def test_bf16_is_fp32_arithmetic_rounded_once(shape: list[int], step: int, lr: float, decay: float, seed: int) -> None:
    """From any stored state, one step ends at most half a bf16 step (and fp32 noise) from float64."""
    param = nn.Parameter(seeded(*shape, seed=seed, dtype=torch.bfloat16))
    adam = of(w=param)
    slots = adam.state()
    m, v = slots["adam.exp_avg.w"].pieces[0], slots["adam.exp_avg_sq.w"].pieces[0]
    m.copy_(seeded(*shape, seed=seed + 1))
    v.copy_(seeded(*shape, seed=seed + 2).square())
    param.grad = seeded(*shape, seed=seed + 3, dtype=torch.bfloat16)
    expected = adam_step(param.detach(), param.grad, m, v, t=step, lr=lr, betas=(0.8, 0.95), decay=decay)
    advance(adam, step=step, lr=lr, weight_decay=decay)
    for ours, exact in zip((param.detach(), m, v), expected, strict=True):
        assert ours.dtype == torch.bfloat16
        assert_close(ours.double(), exact, rtol=1.01 * 2**-8, atol=1e-5)


def test_a_transposed_gradient_is_read_by_its_strides() -> None:
    straight, turned = (nn.Parameter(seeded(6, 4, seed=0)) for _ in range(2))
    straight.grad = seeded(4, 6, seed=1).t().contiguous()
    turned.grad = seeded(4, 6, seed=1).t()
    for param in (straight, turned):
        advance(of(w=param), step=1, lr=0.1)
    assert torch.equal(straight, turned)


def test_mixed_formats_in_one_group_each_keep_theirs() -> None:
    params = {"a": nn.Parameter(seeded(5, seed=0)), "b": nn.Parameter(seeded(5, seed=0, dtype=torch.bfloat16))}
    adam = of(**params)
    for param in params.values():
        param.grad = torch.ones_like(param)
    before = {name: param.detach().clone() for name, param in params.items()}
    advance(adam, step=1, lr=0.25)
    for name, param in params.items():
        assert_close(param.detach(), before[name] - 0.25, rtol=2**-8, atol=2**-8)
        assert adam.state()[f"adam.exp_avg.{name}"].dtype == param.dtype


def test_no_gradient_counts_as_a_zero_gradient() -> None:
    absent, zero = (nn.Parameter(seeded(8, seed=0)) for _ in range(2))
    adams = {id(param): of(w=param) for param in (absent, zero)}
    for step, grads in enumerate([(seeded(8, seed=1),) * 2, (None, torch.zeros(8))], start=1):
        for param, grad in zip((absent, zero), grads, strict=True):
            param.grad = grad
            advance(adams[id(param)], step=step, lr=0.1)
    assert torch.equal(absent, zero)
    assert not torch.equal(absent, seeded(8, seed=0))
