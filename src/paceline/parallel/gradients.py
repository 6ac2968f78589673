"""One gradient for all ranks, exchanged once a step.

`DistributedDataParallel` wraps the compiled model: validation runs the same compiled code, and there is one graph. A
compiled backward pass hands over all gradients at its end, so only uncompiled runs overlap the exchange with it; torch
could split the graph at the buckets, but refuses one with FlexAttention in it. Each rank's gradient is its share of the
mean over the global batch, so ranks add them up.
"""

import contextlib
import copy
import inspect
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from paceline.core.units import BLOCK_TOKENS
from paceline.kernels.row_gradients import RowGradients
from paceline.model.attention import plan_reference
from paceline.model.gpt import GPT
from paceline.model.loss import Losses, head_loss
from paceline.model.masks import window_tensor
from paceline.parallel.embedding_sync import EmbeddingSync
from paceline.parallel.ranks import Ranks
from paceline.settings.parallel import ParallelConfig

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

    from paceline.parallel.fsdp import FsdpSync


class Replica(DistributedDataParallel):
    """The wrapper, and the tables that it leaves alone."""

    tables: EmbeddingSync | None = None

    @contextlib.contextmanager
    def exchange(self, *, now: bool) -> Iterator[None]:
        with contextlib.nullcontext() if now else self.no_sync():
            yield
        if now and self.tables is not None:
            self.tables.start_sums()


class FsdpModel(nn.Module):
    """The same for a model after `fsdp.apply_fsdp`."""

    def __init__(self, model: nn.Module, shards: "FsdpSync") -> None:
        super().__init__()
        self.model, self._shards = model, shards

    def forward(self, *arguments: Tensor) -> Losses:
        losses: Losses = self.model(*arguments)
        return losses

    @contextlib.contextmanager
    def exchange(self, *, now: bool) -> Iterator[None]:
        cast("FSDPModule", self.model).set_requires_gradient_sync(now)
        yield
        if now:
            self._shards.start_sums()


def replicate(
    model: nn.Module, ranks: Ranks, config: ParallelConfig, tables: "EmbeddingSync | FsdpSync | None" = None
) -> nn.Module:
    """A model whose backward pass ends with the sum of all ranks' gradients in every `.grad`; alone, `model` itself.
    Those of `tables` only begin to be added up then. The weights become those of the first rank."""
    if ranks.world == 1:
        return model
    if tables is not None and not isinstance(tables, EmbeddingSync):
        return FsdpModel(model, tables)
    known = inspect.signature(DistributedDataParallel).parameters
    new_name = "forward_sync_buffers"  # since torch 2.13, which warns about the old one
    options: dict[str, Any] = {new_name if new_name in known else "broadcast_buffers": False}  # ours never change
    apart = [param for param in tables.params if param.requires_grad] if tables else []
    for param in apart:
        param.requires_grad_(False)  # gets no place in a bucket
    replica = Replica(model, gradient_as_bucket_view=config.bucket_views, **options)
    for param in apart:
        param.requires_grad_(True)
    replica.register_comm_hook(None, add_up)
    replica.tables = tables
    return replica


def add_up(_: object, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
    """The exchange of one bucket. Without a hook of ours each gradient would be divided by the number of ranks."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: done.value()[0])  # type: ignore[no-any-return]


def exchange(model: nn.Module, *, now: bool) -> AbstractContextManager[None]:
    """Around forward and backward pass of a micro-batch. `now`: the backward pass ends with the exchange of its and all
    earlier gradients; deferred sums begin after it and are not waited for."""
    return model.exchange(now=now) if isinstance(model, Replica | FsdpModel) else contextlib.nullcontext()


def leave_out_unreached(model: GPT, sequence_tokens: int) -> None:
    """Parameters on which the loss does not depend ask for no gradient from now on: their bucket would never fill and
    the exchange never begin. Found by one short sequence, attention and lm_head by their plain paths, which need not be
    compiled. Tables with row gradients never have one of their own and still ask."""
    plain = copy.copy(model)  # the same weights under other seams
    plain.plan, plain.loss = plan_reference, head_loss
    length = min(BLOCK_TOKENS, sequence_tokens)
    tokens = torch.zeros(1, length, dtype=torch.int32, device=model.embeddings.token.device)
    losses: Losses = plain(tokens, tokens.long(), window_tensor([length] * len(model.config.windows), tokens.device))
    rows = model.embeddings.row_gradients
    asking = [p for n, p in model.named_parameters() if n.removeprefix("embeddings.").replace(".", "_") not in rows]
    grads = torch.autograd.grad(losses.main.sum() + sum(losses.terms), asking, allow_unused=True)
    for parameter, grad in zip(asking, grads, strict=True):
        parameter.requires_grad_(grad is not None)
    for store in rows.values():
        cast(RowGradients, store).clear()


def zero_in_place_(parameters: Iterable[nn.Parameter]) -> None:
    """Where None would make the next gradients take memory of their own outside the buckets."""
    torch._foreach_zero_([parameter.grad for parameter in parameters if parameter.grad is not None])
