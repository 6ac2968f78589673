"""One gradient: the true mean over the global batch, summed over micro-batches that change nothing."""

from collections.abc import Callable

import torch
from torch import Tensor

from paceline.data.feed import DeviceBatch
from paceline.model.loss import IGNORE_TARGET
from paceline.train.assemble import Forward


def accumulate_gradient(
    forward: Forward,
    batch: DeviceBatch,
    window: Tensor,
    *,
    micro_sequences: int,
    padded: bool = False,
    after_each: Callable[[], None] | None = None,
) -> Tensor:
    """Add d(mean loss)/d(weights) into every `.grad`; the mean loss, 0-D fp32, stays on the device.

    Each micro-batch's losses are summed and divided by the counted targets of the whole batch, so the result does not
    depend on how the batch is cut. `padded`: some targets do not count. `after_each` is called after every micro-batch.
    """
    counted = (batch.targets != IGNORE_TARGET).sum() if padded else batch.targets.numel()
    total = torch.zeros((), device=batch.tokens.device)
    for tokens, targets in zip(batch.tokens.split(micro_sequences), batch.targets.split(micro_sequences), strict=True):
        loss = forward(tokens, targets, window).sum() / counted
        loss.backward()
        total += loss.detach()
        if after_each is not None:
            after_each()
    return total
