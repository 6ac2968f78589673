"""Head, logit cap and loss. What is averaged over what is the caller's business: losses come back per token."""

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE_TARGET = -100
"""A target that does not count (the padding of aligned documents); its loss is 0."""


def cap_logits(logits: Tensor, cap: float | None) -> Tensor:
    """c·tanh(logits/c) in fp32; without a cap only the cast."""
    logits = logits.float()
    return logits if cap is None else cap * torch.tanh(logits / cap)


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """-log softmax(logits)[target], fp32, of shape (B, T). Padding columns of the head take part in the softmax."""
    losses = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="none", ignore_index=IGNORE_TARGET)
    return losses.view(targets.shape)
