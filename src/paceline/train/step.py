"""One gradient: the true mean over the global batch, summed over micro-batches and ranks that change nothing."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from paceline.data.feed import DeviceBatch
from paceline.model.loss import IGNORE_TARGET
from paceline.parallel.gradients import exchange
from paceline.parallel.ranks import ALONE, Ranks

Differentiate = Callable[[nn.Module, Tensor, Tensor, Tensor, Tensor | int], Tensor]
"""(model, tokens, targets, window, counted) -> sum of the losses over `counted`, whose gradient is now in every
`.grad`, added to what was there."""


def differentiate(model: nn.Module, tokens: Tensor, targets: Tensor, window: Tensor, counted: Tensor | int) -> Tensor:
    loss: Tensor = model(tokens, targets, window).sum() / counted
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def accumulate_gradient(
    model: nn.Module,
    batch: DeviceBatch,
    window: Tensor,
    *,
    micro_sequences: int,
    padded: bool = False,
    ranks: Ranks = ALONE,
    differentiate: Differentiate = differentiate,
) -> Tensor:
    """Add d(mean loss)/d(weights) into every `.grad`; `batch` is this rank's share of the global batch.

    Each micro-batch's losses are summed and divided by the counted targets of the global batch, so the result does not
    depend on how the batch is cut. Ranks exchange gradients once, in the last backward pass; the sums of the large
    tables only begin there (`parallel/tables.py`). `padded`: some targets do not count. Returns this rank's share of
    the mean loss, 0-D fp32, on the device; the shares of all add up to it.
    """
    counted = ranks.sum_((batch.targets != IGNORE_TARGET).sum()) if padded else ranks.world * batch.targets.numel()
    total = torch.zeros((), device=batch.tokens.device)
    micro = list(zip(batch.tokens.split(micro_sequences), batch.targets.split(micro_sequences), strict=True))
    for number, (tokens, targets) in enumerate(micro, start=1):
        with exchange(model, now=number == len(micro)):
            total += differentiate(model, tokens, targets, window, counted)
    return total
