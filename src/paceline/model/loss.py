"""Head, logit cap and losses. What is averaged over what is the caller's business: losses come back per token."""

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.core.errors import ConfigError
from paceline.core.units import IGNORE_TARGET as IGNORE_TARGET
from paceline.settings import plugins

HeadLoss = Callable[[Tensor, Tensor, Tensor, float | None, float], Tensor]
"""(x (N, width), head rows (V, width), targets (N,), cap, shift) -> loss of every token, (N,) fp32, or their total,
0-D."""


class Losses(NamedTuple):
    """What a forward pass returns. Training adds the terms with their weights; validation reads `main`."""

    main: Tensor
    terms: tuple[Tensor, ...] = ()
    """Totals over tokens, 0-D fp32 each."""


@dataclass(frozen=True)
class LossInputs:
    """What a loss term may look at: x (N, width), the normalised stream before the head, and head (V, width). Tokens
    and targets are (B, T), with B T = N."""

    x: Tensor
    head: Tensor
    tokens: Tensor
    targets: Tensor
    cap: float | None
    shift: float = 0.0


TermLoss = Callable[[LossInputs], Tensor]
"""The total of a term over tokens, 0-D fp32; targets that do not count add nothing."""


def cap_logits(logits: Tensor, cap: float | None, shift: float = 0.0) -> Tensor:
    """c·tanh((logits + shift)/c) in fp32; without a cap only the cast."""
    logits = logits.float()
    return logits if cap is None else cap * torch.tanh((logits + shift if shift else logits) / cap)


def head_loss(x: Tensor, weight: Tensor, targets: Tensor, cap: float | None, shift: float = 0.0) -> Tensor:
    """-log softmax(capped logits)[target]. Padding rows of the head take part in the softmax."""
    logits = cap_logits(x @ weight.T, cap, shift)
    return F.cross_entropy(logits, targets, reduction="none", ignore_index=IGNORE_TARGET)


def loss_term(name: str) -> TermLoss:
    """Of a plug-in, or the function `total` of the module `model/loss_terms/<name>.py`."""
    brought: TermLoss | None = plugins.find("loss_terms", name)
    if brought is not None:
        return brought
    if not name.isidentifier():
        raise ConfigError(f"model.loss_terms: {name!r} is no loss term's name")
    module = f"paceline.model.loss_terms.{name}"
    if importlib.util.find_spec(module) is None:
        raise ConfigError(f"model.loss_terms: there is no loss term {name!r}; it would be model/loss_terms/{name}.py")
    found: TermLoss = importlib.import_module(module).total
    return found
