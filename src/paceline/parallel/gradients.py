"""One gradient for all ranks, exchanged once a step.

`DistributedDataParallel` collects gradients in buckets and starts to exchange a bucket as soon as the backward pass has
filled it. It goes around the compiled model, not inside: then validation runs the same compiled code without it, and
there is one graph. Its price: a compiled backward pass hands over all gradients at its end, so only uncompiled runs
overlap the exchange with it. torch could split the graph at the buckets, but refuses one with FlexAttention in it.

Each rank's gradient is its share of the mean over the global batch, so ranks add them up; nothing is divided again.
"""

import contextlib
import inspect
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from paceline.parallel.config import ParallelConfig
from paceline.parallel.ranks import Ranks
from paceline.parallel.tables import SharedTables

if TYPE_CHECKING:
    from paceline.parallel.shards import Shards


@runtime_checkable
class Exchanging(Protocol):
    """A model that knows of other ranks."""

    def exchange(self, *, now: bool) -> AbstractContextManager[None]:
        """As the function of that name below."""


class Replica(DistributedDataParallel):
    """The wrapper, and the tables that it leaves alone."""

    tables: SharedTables | None = None

    @contextlib.contextmanager
    def exchange(self, *, now: bool) -> Iterator[None]:
        with contextlib.nullcontext() if now else self.no_sync():
            yield
        if now and self.tables is not None:
            self.tables.start_sums()


def replicate(
    model: nn.Module, ranks: Ranks, config: ParallelConfig, tables: "SharedTables | Shards | None" = None
) -> nn.Module:
    """A model whose backward pass ends with the sum of all ranks' gradients in every `.grad`; alone, `model` itself.
    Those of `tables` only begin to be added up then. The weights become those of the first rank; those of a sharded
    model are equal already, each drawn from seed and name."""
    if ranks.world == 1:
        return model
    if tables is not None and not isinstance(tables, SharedTables):
        return tables.exchanging(model)
    options: dict[str, Any] = {_buffer_option(): config.broadcast_buffers}
    with _asking_for_none(tables.params if tables else []):  # such parameters get no place in a bucket
        replica = Replica(model, gradient_as_bucket_view=config.bucket_views, **options)
    replica.register_comm_hook(None, add_up)
    replica.tables = tables
    return replica


@contextlib.contextmanager
def _asking_for_none(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Meanwhile these ask for no gradient."""
    asking = [parameter for parameter in parameters if parameter.requires_grad]
    for parameter in asking:
        parameter.requires_grad_(False)
    yield
    for parameter in asking:
        parameter.requires_grad_(True)


def _buffer_option() -> str:
    """`broadcast_buffers` has this other name since torch 2.13, which warns about the old one."""
    known = inspect.signature(DistributedDataParallel).parameters
    return "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"


def add_up(_: object, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
    """The exchange of one bucket. Without a hook of ours each gradient would be divided by the number of ranks."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: done.value()[0])  # type: ignore[no-any-return]


def exchange(model: nn.Module, *, now: bool) -> AbstractContextManager[None]:
    """Around forward and backward pass of a micro-batch: whether its backward pass ends with the exchange, which then
    includes what earlier ones have left. Sums that are not its own begin behind it and are not waited for."""
    return model.exchange(now=now) if isinstance(model, Exchanging) else contextlib.nullcontext()


def leave_out_unreached(parameters: Iterable[nn.Parameter], loss: Tensor) -> None:
    """Parameters on which `loss` does not depend ask for no gradient from now on. Without a gradient their bucket would
    never fill and the exchange never begin; the optimizer takes a missing gradient for zero, as on one rank."""
    asking = list(parameters)
    for parameter, grad in zip(asking, torch.autograd.grad(loss, asking, allow_unused=True), strict=True):
        if grad is None:
            parameter.requires_grad_(False)


def zero_in_place_(parameters: Iterable[nn.Parameter]) -> None:
    """Gradients to zero where they lie. Set to None instead, the next micro-batches would add theirs up outside of the
    buckets, which takes the memory that views save."""
    torch._foreach_zero_([parameter.grad for parameter in parameters if parameter.grad is not None])
