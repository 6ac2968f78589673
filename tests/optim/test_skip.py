"""A skipped step changes nothing, whatever the gradients hold; one that is not skipped is the step without a flag."""

import pytest
import torch
from torch import Tensor, nn

from optim.building import Params, optimizer_of, settings_of
from paceline.optim.optimizer import Optimizer
from paceline.settings.optim import AdamConfig, MuonConfig, OptimConfig

SHAPES = {"matrices": (6, 4), "embeddings": (9, 4), "lm_head": (9, 4), "scalars": (3,)}


def optimizer(config: OptimConfig) -> Optimizer:
    generator = torch.Generator().manual_seed(0)
    params: Params = {}
    for group, shape in SHAPES.items():
        tensor = torch.randn(shape, generator=generator)
        params[group] = {group: nn.Parameter(tensor.bfloat16() if group == "embeddings" else tensor)}
    return optimizer_of(params, config, parts={"matrices": (3, 3)})


def step(subject: Optimizer, number: int, skip: bool | None, *, poison: float | None = None) -> None:
    """One step whose gradients depend on its number alone."""
    generator = torch.Generator().manual_seed(number)
    for param in subject._all_params():
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        if poison is not None:
            param.grad.view(-1)[0] = poison
    settings = settings_of(subject, lr_scale=0.3, momentum=0.85 + 0.01 * number)
    subject.step(settings, skip=None if skip is None else torch.tensor(skip))


def everything(subject: Optimizer) -> dict[str, Tensor]:
    return {**{f"{i}": p.detach().clone() for i, p in enumerate(subject._all_params())}, **subject.state_dict()}


def same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


CONFIGS = [
    OptimConfig(),
    OptimConfig(muon=MuonConfig(momentum_form="average", weight_decay=0.1), adam=AdamConfig(weight_decay=0.1)),
    OptimConfig(matrices="adamw", clip_norm=1.0),
]


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e30])
def test_a_skipped_step_leaves_every_bit_of_weights_and_state(config: OptimConfig, poison: float) -> None:
    subject = optimizer(config)
    step(subject, 0, False)
    before = everything(subject)
    step(subject, 1, True, poison=poison)
    assert same_bits(everything(subject), before)


@pytest.mark.parametrize("config", CONFIGS)
def test_a_step_that_is_not_skipped_is_the_step_without_a_flag(config: OptimConfig) -> None:
    guarded, plain = optimizer(config), optimizer(config)
    for number in range(3):
        step(guarded, number, False)
        step(plain, number, None)
    assert same_bits(everything(guarded), everything(plain))


@pytest.mark.parametrize("config", CONFIGS)
def test_after_a_skipped_step_it_goes_on_as_if_that_had_not_been(config: OptimConfig) -> None:
    """Adam's bias correction does not count it either, also after a load."""
    guarded, plain = optimizer(config), optimizer(config)
    for number, skip in ((0, False), (7, True), (1, False), (8, True)):
        step(guarded, number, skip, poison=float("nan") if skip else None)
    for number in (0, 1):
        step(plain, number, None)
    resumed = optimizer(config)
    resumed.load_state_dict(guarded.state_dict())
    for own, other in zip(resumed._all_params(), guarded._all_params(), strict=True):
        own.data.copy_(other.data)
    for subject in (guarded, plain, resumed):
        step(subject, 2, False)
    assert same_bits(everything(guarded), everything(plain))
    assert same_bits(everything(resumed), everything(plain))
