"""What `metrics.diagnostics` adds to a line of metrics. Off, none of this is called and the model is the same.

Gradient: its norm before clipping, and how much of it is noise, by how the micro-batches differ. Update: its norm
over that of the weights, per class. Model: the largest attention score and the largest logit before the cap, exact
maxima, by a forward pass of their own through the model's seams. CUDA: memory allocated and reserved. A measured step
costs that pass over at most 65,536 tokens, a norm of every gradient of every micro-batch, and a copy of the weights.
Every rank measures, and the figures are those of the global batch.
"""

import copy
from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from paceline.data.feed import DeviceBatch
from paceline.metrics.deferred import Values
from paceline.model.attention import Attend, Plan, attention_of, plan_reference
from paceline.model.gpt import GPT
from paceline.model.loss import HeadLoss
from paceline.model.masks import MaskRule, allowed
from paceline.optim.optimizer import Optimizer
from paceline.optim.rule import global_norm
from paceline.parallel.ranks import SINGLE_PROCESS, Ranks
from paceline.settings.backends import reach_tokens
from paceline.settings.groups import GroupSettings
from paceline.settings.model import LayerConfig, ModelConfig
from paceline.settings.schedule import StepSettings

if TYPE_CHECKING:
    from paceline.train.gradient_step import GradientStep

OBSERVED_TOKENS = 65_536
"""From the start of a batch, in whole sequences, for the extra pass: one GPU's micro-batch of the records."""
QUERIES = 128  # queries whose scores exist at once
CHUNK_LOGITS = 1 << 22  # logits that exist at once: 16 MB of fp32


def measured_step(step: "GradientStep", settings: StepSettings, batch: DeviceBatch) -> Values:
    """A step like any other, to the bit, and what it was like."""
    run = step.run
    values = model_extremes(run.model, batch, step.windows, run.ranks)  # at the weights at which the loss is taken
    with MicroGradients(run.model.parameters()) as micro:
        losses, skip = step.gradient(settings, batch)
    tokens = settings.sequences * run.config.batch.sequence_tokens
    values |= step.named(losses)
    values["gradient_norm"] = norm = run.optimizer.gradient_norm()
    values["gradient_variance"] = variance = micro.variance(norm, run.ranks)
    values["noise_scale_tokens"] = noise_scale_tokens(norm, variance, tokens)
    ratios = update_ratios(run.optimizer, settings.groups, skip)
    return values | {f"update_ratio_{group}": ratio for group, ratio in ratios.items()} | memory(batch.tokens.device)


@torch.no_grad()
def update_ratios(
    optimizer: Optimizer, settings: Mapping[str, GroupSettings], skip: Tensor | None = None
) -> dict[str, Tensor]:
    """A step of the optimizer, and for each group the norm of its update over that of its weights after it, as fp32 0-D
    tensors: 1 for a group that starts at 0, 0 for one at rest there. Costs a copy of all weights."""
    before = {group: [param.clone() for param in named.values()] for group, named in optimizer.groups.items()}
    optimizer.step(settings, skip=skip)
    found = dict[str, Tensor]()
    for group, old in before.items():
        after: list[Tensor] = list(optimizer.groups[group].values())
        update = global_norm([new - was for new, was in zip(after, old, strict=True)])
        found[group] = torch.where(update > 0, update / global_norm(after), 0.0)
    return found


class MicroGradients:
    """While entered, looks at what each backward pass adds to every `.grad`: the gradient of one micro-batch."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._norms: list[list[Tensor]] = [[] for _ in self._parameters]  # a row per parameter, one of each pass
        self._hooks: list[RemovableHandle] = []

    def __enter__(self) -> "MicroGradients":
        def note(norms: list[Tensor], grad: Tensor) -> None:
            norms.append(torch.linalg.vector_norm(grad, dtype=torch.float32))

        pairs = zip(self._parameters, self._norms, strict=True)
        self._hooks = [parameter.register_hook(partial(note, norms)) for parameter, norms in pairs]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def variance(self, norm: Tensor, ranks: Ranks = SINGLE_PROCESS) -> Tensor | None:
        """Unbiased estimate of E|G - E G|² for the global batch's gradient G, whose norm is given; None from a single
        micro-batch. With n equally large ones on all ranks, of gradients g: (mean |g|² - |G|²) / (n - 1)."""
        count = max(map(len, self._norms)) * ranks.world
        if count == 1:
            return None
        squares = torch.stack([norm for norms in self._norms for norm in norms]).square().sum()
        mean_square = ranks.sum_(squares) * count  # a share is g / n, so |g|² is n² times its square
        return (mean_square - norm.square()) / (count - 1)


def noise_scale_tokens(norm: Tensor, variance: Tensor | None, batch_tokens: int) -> Tensor | None:
    """Batch size at which noise and signal would be equal: tokens x variance / |E G|², where |G|² - variance estimates
    the denominator without bias. Of one step it is rough and may be negative."""
    return None if variance is None else batch_tokens * variance / (norm.square() - variance)


@torch.no_grad()
def model_extremes(model: GPT, batch: DeviceBatch, windows: Tensor, ranks: Ranks = SINGLE_PROCESS) -> Values:
    """`largest_score`: of |q·k| x scale over the pairs that may attend, all layers and heads; None without attention.
    `largest_logit`: of |logit| before the cap, padding rows of the head included. Ranks look at those sequences of
    theirs that are among the first of the global batch."""
    scores, logits = list[Tensor](), list[Tensor]()
    windows = windows.to(batch.tokens.device)  # the back end that trains may need them on the host
    observed = copy.copy(model)  # the same weights under other seams
    observed.plan, observed.loss = _watch_scores(scores), _watch_logits(logits)
    here, length = batch.tokens.shape
    observed_here = max(1, OBSERVED_TOKENS // length) - ranks.rank * here
    for sequence in range(min(here, observed_here)):
        row = slice(sequence, sequence + 1)
        observed(batch.tokens[row], batch.targets[row], windows)
    none_yet, attends = torch.zeros((), device=windows.device), bool(model.config.attending)
    return {
        "largest_score": ranks.largest_(torch.stack([none_yet, *scores]).amax()) if attends else None,
        "largest_logit": ranks.largest_(torch.stack([none_yet, *logits]).amax()),
    }


def _watch_scores(found: list[Tensor]) -> Plan:
    """The reference plan, whatever back end trains: uncompiled FlexAttention would hold all scores at once."""

    def plan(config: ModelConfig, documents_BT: Tensor | None, tokens: int, windows: Tensor) -> Attend:
        attend = plan_reference(config, documents_BT, tokens, windows)

        def watched(layer: LayerConfig, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            kinds = list(config.windows) or ["short"]
            window = windows[kinds.index(attention_of(layer).window)]
            found.append(largest_score(config, layer, q, k, documents_BT, window))
            return attend(layer, q, k, v)

        return watched

    return plan


def largest_score(
    config: ModelConfig, layer: LayerConfig, q_BTHD: Tensor, k_BTHD: Tensor, documents_BT: Tensor | None, window: Tensor
) -> Tensor:
    """Largest |q·k| times the scale among the pairs that may attend, in fp32, by blocks of queries."""
    shape, rule, tokens = attention_of(layer), MaskRule.of(config), q_BTHD.size(1)
    reach = reach_tokens(config, tokens, shape.window)
    position = torch.arange(tokens, device=q_BTHD.device)
    q, k = q_BTHD.float(), k_BTHD.float().repeat_interleave(shape.num_heads // shape.kv_heads, dim=2)
    largest = []
    for first in range(0, tokens, QUERIES):
        queries, keys = slice(first, first + QUERIES), slice(max(0, first - reach), first + QUERIES)
        scores = torch.einsum("bqhd,bkhd->bhqk", q[:, queries], k[:, keys]).abs()
        q_doc = k_doc = None
        if documents_BT is not None:
            q_doc, k_doc = documents_BT[:, None, queries, None], documents_BT[:, None, None, keys]
        ok = allowed(rule, position[queries, None], position[None, keys], q_doc, k_doc, window)
        largest.append(scores.masked_fill(~ok, 0.0).amax())
    return torch.stack(largest).amax() * shape.scale


def _watch_logits(found: list[Tensor]) -> HeadLoss:
    """A head that looks at its logits and says that there is no loss."""

    def loss(x: Tensor, weight: Tensor, targets: Tensor, *_: float | None) -> Tensor:
        rows = max(1, CHUNK_LOGITS // weight.size(0))
        found.append(torch.stack([(part @ weight.T).float().abs().amax() for part in x.split(rows)]).amax())
        return torch.zeros(targets.shape, device=x.device)

    return loss


def memory(device: torch.device) -> dict[str, int]:
    """Bytes that the CUDA allocator holds for tensors and in all; nothing on a CPU, where there is no such account."""
    if device.type != "cuda":
        return {}
    allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    return {"allocated_bytes": allocated, "reserved_bytes": reserved}
