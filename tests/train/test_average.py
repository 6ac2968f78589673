"""Averaged weights are what their formula says, step by step, in double precision."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from paceline.settings.optim import AverageConfig
from paceline.train.assemble import Assembly
from paceline.train.average import AverageHook, first_averaged, tau_steps

STEPS = 10


@pytest.mark.parametrize(
    ("start_share", "steps", "first"),
    [(0.7, 10, 7), (0.7, 9, 6), (0.7, 8, 6), (0.0, 10, 1), (1.0, 10, 10), (0.04, 10, 1)],  # 6.3 and 5.6 are rounded
)
def test_the_average_begins_at_the_nearest_step_and_after_one_at_least(
    start_share: float, steps: int, first: int
) -> None:
    assert first_averaged(AverageConfig(tau_steps=2.0, start_share=start_share), steps) == first


def test_tau_is_a_number_of_steps_or_a_share_of_the_run() -> None:
    assert tau_steps(AverageConfig(tau_steps=3.5), 10) == tau_steps(AverageConfig(tau_steps=3.5), 90) == 3.5
    assert tau_steps(AverageConfig(tau_share=0.25), 10) == 2.5
    assert tau_steps(AverageConfig(tau_share=0.25), 90) == 22.5


def run_of(config: AverageConfig, params: dict[str, dict[str, nn.Parameter]]) -> Assembly:
    """As far as the hook looks at it."""
    settings = SimpleNamespace(optim=SimpleNamespace(average=config), steps=STEPS)
    return cast(Assembly, SimpleNamespace(config=settings, model=SimpleNamespace(parameter_groups=lambda: params)))


def walked(config: AverageConfig) -> tuple[AverageHook, nn.Parameter, nn.Parameter, list[Tensor]]:
    """A hook after all steps of two parameters, the second of a group that is not averaged, and the first's path."""
    generator = torch.Generator().manual_seed(0)
    moved, other = (nn.Parameter(torch.zeros(3, 4, dtype=d)) for d in (torch.float32, torch.bfloat16))
    hook = AverageHook(run_of(config, {"matrices": {"a": moved}, "scalars": {"b": other}}))
    path = []
    for step in range(STEPS):
        with torch.no_grad():
            moved += torch.randn(3, 4, generator=generator)
            other += 1
        path.append(moved.detach().double().clone())
        hook.after_step(cast(Any, SimpleNamespace(step=step)), {})
    return hook, moved, other, path


@pytest.mark.parametrize(
    ("config", "tau"),
    [
        (AverageConfig(tau_steps=4.0, start_share=0.3), 4.0),
        (AverageConfig(tau_share=0.2, start_share=0.0), 2.0),
        (AverageConfig(tau_steps=0.5, start_share=0.5), 1.0),  # never past the weights
        (AverageConfig(tau_steps=4.0, start_share=0.3, blend=0.25), 4.0),
        (AverageConfig(tau_steps=4.0, start_share=0.3, rescale=False), 4.0),
    ],
)
def test_what_is_shipped_is_the_formula(config: AverageConfig, tau: float) -> None:
    hook, moved, other, path = walked(config)
    first = first_averaged(config, STEPS)
    average = path[first - 1]
    for weights in path[first:]:
        average = average + (weights - average) / tau
    expected = path[-1] + config.blend * (average - path[-1])
    if config.rescale:
        expected = expected * path[-1].norm() / expected.norm()
    assert set(hook.state()) == {"a"}
    with hook.shipped():
        torch.testing.assert_close(moved.double(), expected, rtol=1e-5, atol=1e-6)
        assert bool((other == STEPS).all())
    assert torch.equal(moved.double(), path[-1])


def test_the_weights_come_back_also_after_an_error() -> None:
    hook, moved, _, path = walked(AverageConfig(tau_steps=4.0))
    with pytest.raises(ZeroDivisionError), hook.shipped():
        raise ZeroDivisionError
    assert torch.equal(moved.double(), path[-1])


def test_a_hook_goes_on_from_its_state() -> None:
    config = AverageConfig(tau_steps=4.0, start_share=0.3)
    hook, moved, other, _ = walked(config)
    fresh = AverageHook(run_of(config, {"matrices": {"a": moved}, "scalars": {"b": other}}))
    fresh.load(hook.state())
    assert torch.equal(fresh.state()["a"], hook.state()["a"])
    assert fresh.state()["a"].dtype is torch.float32
