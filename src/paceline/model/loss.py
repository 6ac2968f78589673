"""Head, logit cap and loss. What is averaged over what is the caller's business: losses come back per token."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.kernels.head_loss import head_loss_chunked

IGNORE_TARGET = -100
"""A target that does not count (the padding of aligned documents); its loss is 0."""

HeadLoss = Callable[[Tensor, Tensor, Tensor, float | None], Tensor]
"""(x (N, width), head rows (V, width), targets (N,), cap) -> loss of every token, (N,) fp32, or their total, 0-D."""


def cap_logits(logits: Tensor, cap: float | None) -> Tensor:
    """c·tanh(logits/c) in fp32; without a cap only the cast."""
    logits = logits.float()
    return logits if cap is None else cap * torch.tanh(logits / cap)


def head_loss(x: Tensor, weight: Tensor, targets: Tensor, cap: float | None) -> Tensor:
    """-log softmax(capped logits)[target]. Padding rows of the head take part in the softmax."""
    return F.cross_entropy(cap_logits(x @ weight.T, cap), targets, reduction="none", ignore_index=IGNORE_TARGET)


def head_loss_by_chunks(x: Tensor, weight: Tensor, targets: Tensor, cap: float | None) -> Tensor:
    """The same without ever holding all logits."""
    return head_loss_chunked(x, weight, targets, cap, IGNORE_TARGET)


HEAD_LOSSES: dict[str, HeadLoss] = {"reference": head_loss, "chunked": head_loss_by_chunks}
"""Back ends that work everywhere, by the names that `--head.backend` and the probe use."""


def head_loss_named(name: str, chunk_tokens: int | None = None) -> HeadLoss:
    """A back end by name, by chunks of so many tokens if it works by chunks. `fused` needs Triton, hence the import
    here, and gives the total only: its gradient is made in the forward pass, where every token weighs the same."""
    if name == "chunked" and chunk_tokens is not None:
        return lambda x, weight, targets, cap: head_loss_chunked(x, weight, targets, cap, IGNORE_TARGET, chunk_tokens)
    if name != "fused":
        return HEAD_LOSSES[name]
    from paceline.kernels.head_loss_fused import head_loss_fused

    return lambda x, weight, targets, cap: head_loss_fused(x, weight, targets, cap, IGNORE_TARGET, chunk_tokens)
