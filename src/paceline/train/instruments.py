"""What `metrics.instruments` adds to a recorded step. Off, none of this is called and the model is the same.

Gradient: its norm before clipping, and how much of it is noise, told by how the micro-batches differ. Update: its norm
over that of the weights, per class. Model: the largest attention score and the largest logit before the cap, both exact
maxima, found by a forward pass of their own through the model's seams, so that the graph that trains stays as it is.
CUDA: memory allocated and reserved. Everything is a 0-D tensor on the device until its record is written.
A measured step costs that pass over at most 65,536 tokens, a copy of the gradients where there are micro-batches, and a
copy of the weights; `metrics.every` decides how often.
"""

import copy
import math
from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import Tensor, nn

from paceline.data.feed import DeviceBatch
from paceline.model.attention import Attend, plan_reference, reach_tokens
from paceline.model.config import ModelConfig
from paceline.model.gpt import GPT
from paceline.model.masks import MaskRule, allowed
from paceline.optim.optimizer import global_norm
from paceline.train.assemble import Parts
from paceline.train.recorder import Values

OBSERVED_TOKENS = 65_536
"""Tokens from the start of a batch that the extra pass looks at, in whole sequences: one GPU's micro-batch of the
records, so that it takes a small part of their step. The same for any micro-batch and any number of ranks."""
QUERIES = 128
"""Queries whose scores exist at once."""
CHUNK_LOGITS = 1 << 22
"""Logits that exist at once: 16 MB of fp32."""


class Gradient(Protocol):
    """Computes the gradient of the whole batch into `.grad`; the mean loss."""

    def __call__(self, *, after_each: Callable[[], None]) -> Tensor: ...


def measured_step(
    parts: Parts, batch: DeviceBatch, window: Tensor, gradient: Gradient, *, lr_scale: float, momentum: float
) -> Values:
    """A step like any other, to the bit, and what it was like. `gradient` is that of `batch`."""
    model, optimizer = parts.model, parts.optimizer
    values = model_extremes(model, batch, window)  # at the weights at which the loss is taken
    micro = MicroGradients(model.parameters())
    values["train_loss"] = gradient(after_each=micro.take)
    micro.put_back()
    values["gradient_norm"] = norm = optimizer.gradient_norm()
    values["gradient_variance"] = variance = micro.variance(norm)
    values["noise_scale_tokens"] = noise_scale_tokens(norm, variance, parts.config.batch.tokens)
    ratios = optimizer.measured_step(lr_scale=lr_scale, momentum=momentum)
    return values | {f"update_ratio_{kind}": ratio for kind, ratio in ratios.items()} | memory(batch.tokens.device)


class MicroGradients:
    """Takes the gradient of each micro-batch aside, so that its norm can be read before it joins the sum.

    The sum is formed in the order and by the operation that autograd uses, so the step has the same bits."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._sums: dict[int, Tensor] = {}
        self._norms: list[Tensor] = []

    def take(self) -> None:
        """After each backward pass: what `.grad` holds is one micro-batch's share of the mean."""
        found = {i: p.grad for i, p in enumerate(self._parameters) if p.grad is not None}
        self._norms.append(global_norm(list(found.values())))
        for i, grad in found.items():
            self._sums[i] = self._sums[i].add_(grad) if i in self._sums else grad
            self._parameters[i].grad = None

    def put_back(self) -> None:
        """After the last: `.grad` holds the gradient of the whole batch, as without this object."""
        for i, total in self._sums.items():
            self._parameters[i].grad = total

    def variance(self, norm: Tensor) -> Tensor | None:
        """Unbiased estimate of E|G - E G|² for the batch's gradient G, whose norm is given; None from a single
        micro-batch. With n of them, of gradients g: (mean |g|² - |G|²) / (n - 1). Takes them for equally large, which
        padding may make a little untrue."""
        count = len(self._norms)
        if count == 1:
            return None
        own_square = (torch.stack(self._norms) * count).square().mean()  # a share is g / n
        return (own_square - norm.square()) / (count - 1)


def noise_scale_tokens(norm: Tensor, variance: Tensor | None, batch_tokens: int) -> Tensor | None:
    """Batch size at which noise and signal would be equal: tokens x variance / |E G|², where |G|² - variance estimates
    the denominator without bias. One step's value is rough and may be negative: average norm² and variance over steps,
    then divide."""
    return None if variance is None else batch_tokens * variance / (norm.square() - variance)


@torch.no_grad()
def model_extremes(model: GPT, batch: DeviceBatch, window: Tensor) -> Values:
    """`largest_score`: of |q·k| x scale over the pairs that may attend, all layers and heads; None without attention.
    `largest_logit`: of |logit| before the cap, padding rows of the head included, since they take part in the softmax.
    """
    scores: list[Tensor] = []
    logits: list[Tensor] = []
    observed = copy.copy(model)  # the same weights under other seams
    observed.plan, observed.loss = _watch_scores(scores), _watch_logits(logits)
    sequences = max(1, OBSERVED_TOKENS // batch.tokens.size(1))
    for tokens, targets in zip(batch.tokens[:sequences].split(1), batch.targets[:sequences].split(1), strict=True):
        observed(tokens, targets, window)
    return {"largest_score": _largest(scores), "largest_logit": _largest(logits)}


def _largest(found: list[Tensor]) -> Tensor | None:
    return torch.stack(found).amax() if found else None


def _watch_scores(found: list[Tensor]) -> Callable[[ModelConfig, Tensor | None, int, Tensor], Attend]:
    """The reference plan, whatever back end trains: uncompiled FlexAttention would hold all scores at once."""

    def plan(config: ModelConfig, documents_BT: Tensor | None, tokens: int, window: Tensor) -> Attend:
        attend = plan_reference(config, documents_BT, tokens, window)

        def watched(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            found.append(largest_score(config, q, k, documents_BT, window))
            return attend(layer, q, k, v)

        return watched

    return plan


def largest_score(
    config: ModelConfig, q_BTHD: Tensor, k_BTHD: Tensor, documents_BT: Tensor | None, window: Tensor
) -> Tensor:
    """Largest |q·k| / sqrt(D) among the pairs that may attend, in fp32, by blocks of queries."""
    rule, tokens, reach = MaskRule.of(config), q_BTHD.size(1), reach_tokens(config, q_BTHD.size(1))
    position = torch.arange(tokens, device=q_BTHD.device)
    q, k = q_BTHD.float(), k_BTHD.float().repeat_interleave(config.num_heads // config.kv_heads, dim=2)
    largest = []
    for first in range(0, tokens, QUERIES):
        queries, keys = slice(first, first + QUERIES), slice(max(0, first - reach), first + QUERIES)
        scores = torch.einsum("bqhd,bkhd->bhqk", q[:, queries], k[:, keys]).abs()
        q_doc = k_doc = None
        if documents_BT is not None:
            q_doc, k_doc = documents_BT[:, None, queries, None], documents_BT[:, None, None, keys]
        ok = allowed(rule, position[queries, None], position[None, keys], q_doc, k_doc, window)
        largest.append(scores.masked_fill(~ok, 0.0).amax())
    return torch.stack(largest).amax() / math.sqrt(config.head_dim)


def _watch_logits(found: list[Tensor]) -> Callable[[Tensor, Tensor, Tensor, float | None], Tensor]:
    """A head that looks at its logits and says that there is no loss."""

    def loss(x: Tensor, weight: Tensor, targets: Tensor, _: float | None) -> Tensor:
        rows = max(1, CHUNK_LOGITS // weight.size(0))
        found.append(torch.stack([(part @ weight.T).float().abs().amax() for part in x.split(rows)]).amax())
        return torch.zeros(targets.shape, device=x.device)

    return loss


def memory(device: torch.device) -> dict[str, int]:
    """Bytes that the CUDA allocator holds for tensors and in all; nothing on a CPU, where there is no such account."""
    if device.type != "cuda":
        return {}
    return {
        "allocated_bytes": torch.cuda.memory_allocated(device),
        "reserved_bytes": torch.cuda.memory_reserved(device),
    }
