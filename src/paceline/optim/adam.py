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
from paceline.optim.slots import Slot
from paceline.optim.tables import AllHere, Tables


def adam_(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    *,
    step: int,
    lr: float,
    config: AdamConfig,
    skip: Tensor | None = None,
    skipped: Tensor | None = None,
) -> None:
    """One update in place. All tensors of one dtype and device; `step` counts from 1, as the bias correction does, of
    which `skipped` (0-D fp32) were none. Where `skip` (0-D bool) is true, this one is none either."""
    counter = torch.full((), float(step), device=params[0].device)  # filled on the device: a copy would wait for it
    if skipped is not None:
        counter = counter - skipped
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
        found_inf=None if skip is None else skip.float(),  # the kernel's way to do nothing
    )


class AdamGroup:
    """Parameters of one rate, dtype and device, and their two moments, which exist from construction on: of a shared
    table, only this process's rows."""

    def __init__(self, params: Mapping[str, nn.Parameter], lr: float, tables: Tables) -> None:
        self.params, self.lr, self.tables = dict(params), lr, tables
        self.rows = {name: rows for name, param in params.items() if (rows := tables.rows(param)) is not None}
        self.weights = [tables.own(param, param.detach()) for param in params.values()]
        self.exp_avgs = [torch.zeros_like(own, memory_format=torch.contiguous_format) for own in self.weights]
        self.exp_avg_sqs = [torch.zeros_like(own, memory_format=torch.contiguous_format) for own in self.weights]

    def grads(self) -> list[Tensor]:
        return [
            torch.zeros_like(own) if param.grad is None else self.tables.own(param, param.grad)
            for own, param in zip(self.weights, self.params.values(), strict=True)
        ]

    def slots(self, moments: list[Tensor]) -> dict[str, Slot]:
        """By parameter."""
        return {
            name: Slot([own], param, self.rows[name]) if name in self.rows else Slot([own])
            for own, (name, param) in zip(moments, self.params.items(), strict=True)
        }


class Adam:
    """One optimizer object: classes of parameters, each with its rate. Of `tables` that processes share it moves the
    own rows and begins to gather the others; who called `step` finishes that."""

    def __init__(
        self,
        classes: Iterable[tuple[Mapping[str, nn.Parameter], float]],
        config: AdamConfig,
        tables: Tables | None = None,
    ) -> None:
        self.config = config
        self.tables = tables or AllHere()
        self.groups = [AdamGroup(params, lr, self.tables) for named, lr in classes for params in _by_format(named)]

    def step(self, *, step: int, lr_scale: float, skip: Tensor | None = None, skipped: Tensor | None = None) -> None:
        for group in self.groups:
            adam_(
                group.weights,
                group.grads(),
                group.exp_avgs,
                group.exp_avg_sqs,
                step=step,
                lr=group.lr * lr_scale,
                config=self.config,
                skip=skip,
                skipped=skipped,
            )
            for name in group.rows:
                self.tables.start_gather(group.params[name])

    def state(self) -> dict[str, Slot]:
        found: dict[str, Slot] = {}
        for group in self.groups:
            for kind in ("exp_avg", "exp_avg_sq"):
                slots = group.slots(getattr(group, f"{kind}s"))
                found |= {f"adam.{kind}.{name}": slot for name, slot in slots.items()}
        return found


def _by_format(params: Mapping[str, nn.Parameter]) -> list[dict[str, nn.Parameter]]:
    """The kernel takes tensors of one dtype on one device."""
    groups: dict[tuple[torch.dtype, torch.device], dict[str, nn.Parameter]] = {}
    for name, param in params.items():
        groups.setdefault((param.dtype, param.device), {})[name] = param
    return list(groups.values())
