"""Adam for large lookup tables with row gradients: no first moment, and one second moment per row.

v ← β₂^(missed + 1) v + (1 - β₂) mean(g²);  u = lr √(1 - β₂^e) g / (√v + ε) at update e;  p ← p - u, and where u and p
have the same sign p ← p - lr·decay·p as well. A row that no token of the step looked up does not move; its v decays
when it is next touched. So an update costs what the step looked up, not what the table holds, and 8 bytes of state a
row.
"""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from paceline.kernels.row_gradients import coalesced
from paceline.optim.rule import Event, RuleContext, Slot, no_more
from paceline.settings.groups import ParamGroup, RuleFacts

FACTS = RuleFacts(gradient="rows", row_bytes=8)


class Rule:
    def __init__(self, group: ParamGroup, params: Mapping[str, nn.Parameter], context: RuleContext) -> None:
        self._params, self._update = dict(params), context.update_rows or update_plainly
        self._squares = {n: torch.zeros(len(p), device=p.device) for n, p in params.items()}
        self._last = {n: torch.zeros(len(p), dtype=torch.int32, device=p.device) for n, p in params.items()}
        """The update at which each row was last touched."""

    @torch.no_grad()
    def start(self, event: Event) -> Callable[[], None]:
        for name, param in self._params.items():
            self._update(param, self._squares[name], self._last[name], *event.rows[name], event)
        return no_more

    def state(self) -> dict[str, Slot]:
        return {f"adam_rows.square.{name}": Slot([square]) for name, square in self._squares.items()} | {
            f"adam_rows.last.{name}": Slot([last]) for name, last in self._last.items()
        }


def update_plainly(param: Tensor, square: Tensor, last: Tensor, ids: Tensor, rows: Tensor, event: Event) -> None:
    """An `UpdateRows`. Distinct ids with their sums come back as many as were given, some more than once: equal values
    are then written again. Where `event.skip` is true, every row is written back as it was."""
    ids, sums = coalesced(ids, rows)
    s, now = event.settings, torch.full((), event.step, device=ids.device)
    if event.skipped is not None:
        now = now - event.skipped
    old, v_old, missed = param[ids].float(), square[ids], now - last[ids]
    v = v_old * torch.exp(missed * math.log(s.beta2)) if s.beta2 > 0 else torch.zeros_like(v_old)
    v = v + (1 - s.beta2) * sums.square().mean(dim=1)
    bias = torch.sqrt(1 - torch.exp(now * math.log(s.beta2))) if s.beta2 > 0 else torch.ones_like(now)
    update = s.lr * bias * sums / (v.sqrt() + s.eps)[:, None]
    if s.weight_decay:
        update = update + torch.where(update * old > 0, s.lr * s.weight_decay * old, 0.0)
    new, at = old - update, now.to(last.dtype).expand_as(ids)
    if event.skip is not None:
        new, v = torch.where(event.skip, old, new), torch.where(event.skip, v_old, v)
        at = torch.where(event.skip, last[ids], at)
    param.index_copy_(0, ids, new.to(param.dtype))
    square.index_copy_(0, ids, v)
    last.index_copy_(0, ids, at)
