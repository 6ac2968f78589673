"""Optimizers and rules for tests, put together as a run puts them together, and the settings of their steps."""

from collections.abc import Mapping, Sequence
from functools import partial

import torch

from paceline.kernels.row_gradients import RowGradients
from paceline.optim.newton_schulz import Iteration, orthogonalise
from paceline.optim.optimizer import NamedParams, Optimizer, newton_schulz
from paceline.optim.rule import ParamSync, RuleContext, ShareWork, all_here
from paceline.settings.groups import GroupSettings, param_groups
from paceline.settings.optim import OptimConfig

Params = dict[str, NamedParams]
STEPS = 10**6
"""A run so long that no step of a test is its last."""

float64_iteration = partial(
    orthogonalise, steps=5, dtype=torch.float64, association="polynomial_first", norm_of="rounded"
)


def settings(lr: float, **changes: float | bool) -> GroupSettings:
    """Of one group in one step; what is not named is as in `AdamConfig`."""
    usual = {"momentum": 0.9, "beta1": 0.8, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0, "moves": True}
    return GroupSettings(lr=lr, **{**usual, **changes})  # type: ignore[arg-type]


def optimizer_of(
    params: Params,
    config: OptimConfig,
    *,
    parts: Mapping[str, Sequence[int]] | None = None,
    bf16_products: bool = False,
    iteration: Iteration = orthogonalise,
    share_work: ShareWork = all_here,
    row_gradients: Mapping[str, RowGradients] | None = None,
    sync: ParamSync | None = None,
) -> Optimizer:
    context = RuleContext(
        orthogonalise=newton_schulz(config.muon, iteration, bf16_products=bf16_products),
        muon=config.muon,
        parts=parts or {},
        share_work=share_work,
        sync=sync or ParamSync(),
    )
    groups = param_groups(config, params)
    return Optimizer(params, groups, context, clip_norm=config.clip_norm, row_gradients=row_gradients)


def settings_of(
    optimizer: Optimizer, *, lr_scale: float = 1.0, momentum: float = 0.9, step: int = 0, steps: int = STEPS
) -> dict[str, GroupSettings]:
    """Of every group at a step, as `schedule` gives them."""
    return {name: group.settings(step, steps, lr_scale, momentum) for name, group in optimizer.param_groups.items()}
