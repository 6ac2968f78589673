"""Adam with decoupled weight decay.

It is torch's fused kernel: one pass over memory, arithmetic in fp32 whatever the storage, both moments kept in the
parameter's dtype: for bf16 tables that halves the state, and late in the cool-down an update below half a bf16 step of
the weight is lost, as in the records. torch.optim.Adam makes its slots too late for a checkpoint before the first step.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from paceline.optim.rule import Event, RuleContext, Slot, no_more
from paceline.settings.groups import ParamGroup, RuleFacts

FACTS = RuleFacts(slots=2)


def adam_(
    params: list[Tensor], grads: list[Tensor], exp_avgs: list[Tensor], exp_avg_sqs: list[Tensor], event: Event
) -> None:
    """One update in place. All tensors of one dtype and device."""
    s = event.settings
    counter = torch.full((), float(event.step), device=params[0].device)  # filled there: a copy would wait for it
    if event.skipped is not None:
        counter = counter - event.skipped
    torch._fused_adamw_(
        params,
        [grad.contiguous() for grad in grads],  # the kernel reads memory in order and ignores strides
        exp_avgs,
        exp_avg_sqs,
        [],
        [counter] * len(params),
        lr=s.lr,
        beta1=s.beta1,
        beta2=s.beta2,
        weight_decay=s.weight_decay,
        eps=s.eps,
        amsgrad=False,
        maximize=False,
        found_inf=None if event.skip is None else event.skip.float(),  # the kernel's way to do nothing
    )


class Rule:
    """Both moments of every parameter: of a shared table, only this process's rows."""

    def __init__(self, group: ParamGroup, params: Mapping[str, nn.Parameter], context: RuleContext) -> None:
        self._params, self._sync = dict(params), context.sync
        self._weights = {name: context.sync.own(param, param.detach()) for name, param in params.items()}
        self._moments = {
            kind: {n: torch.zeros_like(w, memory_format=torch.contiguous_format) for n, w in self._weights.items()}
            for kind in ("exp_avg", "exp_avg_sq")
        }
        self._formats: dict[tuple[torch.dtype, torch.device], list[str]] = {}
        """Names of parameters that one call of the kernel may update."""
        for name, param in params.items():
            self._formats.setdefault((param.dtype, param.device), []).append(name)

    def start(self, event: Event) -> Callable[[], None]:
        for names in self._formats.values():
            params, weights = [self._params[name] for name in names], [self._weights[name] for name in names]
            exp_avgs, exp_avg_sqs = ([of_kind[name] for name in names] for of_kind in self._moments.values())
            adam_(weights, [self._sync.grad(param) for param in params], exp_avgs, exp_avg_sqs, event)
            for param in params:
                if self._sync.rows(param) is not None:
                    self._sync.start_gather(param)
        return no_more

    def state(self) -> dict[str, Slot]:
        return {
            f"adam.{kind}.{name}": Slot([of_kind[name]], self._params[name], self._sync.rows(self._params[name]))
            for names in self._formats.values()
            for kind, of_kind in self._moments.items()
            for name in names
        }
