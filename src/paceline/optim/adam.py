"""Adam with decoupled weight decay for everything Muon does not take.

It is torch's fused kernel, called directly: one pass over memory, arithmetic in fp32 whatever the storage, both moments
kept in the parameter's dtype. For bf16 tables that halves the state and has a price that the records pay too: late in
the cool-down an update below half a bf16 step of the weight is lost. We call the kernel ourselves because
torch.optim.Adam makes its slots at the first step, and a checkpoint must find them before it. A parameter without a
gradient counts as one whose gradient is zero: its moments decay like all others.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from paceline.optim.config import AdamConfig


def adam_(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    *,
    step: int,
    lr: float,
    config: AdamConfig,
) -> None:
    """One update in place. All tensors of one dtype and device; `step` counts from 1, as the bias correction does."""
    counter = torch.full((), float(step), device=params[0].device)  # filled on the device: a copy would wait for it
    torch._fused_adamw_(
        params,
        [grad.contiguous() for grad in grads],  # the kernel reads memory in order and ignores strides
        exp_avgs,
        exp_avg_sqs,
        [],
        [counter] * len(params),
        lr=lr,
        beta1=config.beta1,
        beta2=config.beta2,
        weight_decay=config.weight_decay,
        eps=config.eps,
        amsgrad=False,
        maximize=False,
    )


class AdamGroup:
    """Parameters of one rate, dtype and device, and their two moments, which exist from construction on."""

    def __init__(self, params: Mapping[str, nn.Parameter], lr: float) -> None:
        self.names = list(params)
        self.params: list[Tensor] = list(params.values())
        self.lr = lr
        self.exp_avgs = [torch.zeros_like(param, memory_format=torch.contiguous_format) for param in self.params]
        self.exp_avg_sqs = [torch.zeros_like(param, memory_format=torch.contiguous_format) for param in self.params]

    def grads(self) -> list[Tensor]:
        return [torch.zeros_like(param) if param.grad is None else param.grad for param in self.params]


class Adam:
    """One optimizer object: classes of parameters, each with its rate."""

    def __init__(self, classes: Iterable[tuple[Mapping[str, nn.Parameter], float]], config: AdamConfig) -> None:
        self.config = config
        self.groups = [AdamGroup(params, lr) for named, lr in classes for params in _by_format(named)]

    def step(self, *, step: int, lr_scale: float) -> None:
        for group in self.groups:
            lr = group.lr * lr_scale
            adam_(group.params, group.grads(), group.exp_avgs, group.exp_avg_sqs, step=step, lr=lr, config=self.config)

    def state(self) -> dict[str, list[Tensor]]:
        """Slot name to the buffer that holds it."""
        found: dict[str, list[Tensor]] = {}
        for group in self.groups:
            for slot in ("exp_avg", "exp_avg_sq"):
                tensors = getattr(group, f"{slot}s")
                found |= {f"adam.{slot}.{name}": [tensor] for name, tensor in zip(group.names, tensors, strict=True)}
        return found


def _by_format(params: Mapping[str, nn.Parameter]) -> list[dict[str, nn.Parameter]]:
    """The kernel takes tensors of one dtype on one device."""
    groups: dict[tuple[torch.dtype, torch.device], dict[str, nn.Parameter]] = {}
    for name, param in params.items():
        groups.setdefault((param.dtype, param.device), {})[name] = param
    return list(groups.values())
