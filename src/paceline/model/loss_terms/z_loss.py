"""z-loss: the squared logarithm of the softmax's denominator, which keeps logits from drifting away together."""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from paceline.model.loss import IGNORE_TARGET, LossInputs, cap_logits

CHUNK_TOKENS = 4_096
"""Tokens whose logits exist at once; they are computed again in the backward pass."""


def total(inputs: LossInputs) -> Tensor:
    """Σ log²Z over the tokens that count."""
    counted = inputs.targets.flatten() != IGNORE_TARGET
    chunks = zip(inputs.x.split(CHUNK_TOKENS), counted.split(CHUNK_TOKENS), strict=True)
    given = inputs.head, inputs.cap, inputs.shift
    parts = [checkpoint(_squares, x, here, *given, use_reentrant=False) for x, here in chunks]
    return torch.stack(parts).sum()


def _squares(x: Tensor, counted: Tensor, head: Tensor, cap: float | None, shift: float) -> Tensor:
    log_z = torch.logsumexp(cap_logits(x @ head.T, cap, shift), dim=-1)
    return torch.where(counted, log_z, 0.0).square().sum()
