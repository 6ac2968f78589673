"""Models that outgrow one device: every rank keeps a share of the rows of every matrix and table, of its gradient and
of its optimizer state (`parallel.fully_shard`), by torch's `fully_shard`.

A block's weights are gathered when it is entered and let go when it is left, in both passes; embeddings and head stay
from the first forward pass of a micro-batch to the end of its backward pass. Gradients are added up and dealt out once
a step; between the micro-batches of a step every rank holds them whole. The scalars, a few hundred numbers that may
have another format, stay whole on every rank. Adam is elementwise and moves a rank's own rows. Muon needs whole
matrices: the rows of each one's direction travel to the rank that orthogonalises it and come back, while other stacks
are worked on.

Rows are dealt as `tables.rows_of` deals them, which is also torch's rule; a test holds the two together. What is handed
to a checkpoint is whole, one tensor at a time on the device. At the start every process makes the whole model in the
host's memory; only shards of it, and one block at a time, reach the device.
"""

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from paceline.model.gpt import GPT
from paceline.optim.muon import Member, Orthogonalise, ShareWork, Stack
from paceline.optim.tables import global_norm
from paceline.parallel.matrices import deal
from paceline.parallel.ranks import Ranks
from paceline.parallel.tables import LateSums, gathered, part_here, rows_of


def shard_(model: GPT, device: torch.device) -> None:
    """Leave this rank its rows of every matrix and table of a model that all ranks have alike, on `device`."""
    assert dist.group.WORLD is not None
    mesh = DeviceMesh.from_group(dist.group.WORLD, device.type)
    scalars = {parameter for parameter in model.parameters() if parameter.dim() < 2}
    wrap = partial(fully_shard, mesh=mesh, ignored_params=scalars)
    for block in model.blocks:  # first: what is left goes to the module around it
        wrap(block)
    wrap(model.embeddings, reshard_after_forward=False)  # a group of its own: it may have another format than the head
    register_fsdp_forward_method(model.embeddings, "value_rows")
    wrap(model, reshard_after_forward=False)  # last: it finds the others and orders their gathers
    # Nothing here changes a block's output in place, which is what torch warns of.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    for module in _sharded_modules(model):
        module.set_gradient_divide_factor(1.0)  # a rank's gradient is its share of the mean already
        module.set_force_sum_reduction_for_comms(True)  # a plain sum, the only one that gloo knows
    model.register_forward_hook(_let_go)
    for scalar in scalars:
        scalar.data = scalar.data.to(device)


def _let_go(model: nn.Module, *_: object) -> None:
    """After a pass without gradients: there is no backward pass that would let go of embeddings and head."""
    if not torch.is_grad_enabled():
        for module in _sharded_modules(model):
            module.reshard()


def _sharded_modules(model: nn.Module) -> Iterator[FSDPModule]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))


class Shards(LateSums):
    """`optim.tables.Tables` of a model after `shard_`: every matrix and table is shared, the scalars are not, and torch
    does not add up their gradients."""

    passes_together = True

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        super().__init__((param for param in model.parameters() if not isinstance(param, DTensor)), ranks)

    def share_work(self) -> ShareWork:
        return partial(_share, self._ranks)

    def exchanging(self, model: nn.Module) -> "ShardedModel":
        return ShardedModel(model, self)

    def rows(self, table: Tensor) -> slice | None:
        return rows_of(self._ranks.rank, self._ranks.world, len(table)) if isinstance(table, DTensor) else None

    def own(self, table: Tensor, of: Tensor) -> Tensor:
        return part_here(of)

    def norm(self, params: Iterable[nn.Parameter]) -> Tensor:
        grads = [param.grad for param in params if param.grad is not None]
        shared = global_norm([grad.to_local() for grad in grads if isinstance(grad, DTensor)]).square()
        whole = global_norm([grad for grad in grads if not isinstance(grad, DTensor)]).square()
        return (self._ranks.sum_(shared) + whole).sqrt()

    def start_gather(self, table: Tensor) -> None:
        """Nothing: a forward pass gathers what it needs."""

    def finish_gathers(self) -> None:
        pass

    def whole(self, own: Tensor, table: Tensor) -> Tensor:
        return gathered(own, table.shape, self._ranks)


class ShardedModel(nn.Module):
    """A model after `shard_` in training: it knows of the exchange."""

    def __init__(self, model: nn.Module, shards: Shards) -> None:
        super().__init__()
        self.model, self._shards = model, shards

    def forward(self, *arguments: Tensor) -> Tensor:
        losses: Tensor = self.model(*arguments)
        return losses

    @contextlib.contextmanager
    def exchange(self, *, now: bool) -> Iterator[None]:
        cast(FSDPModule, self.model).set_requires_gradient_sync(now)
        yield
        if now:
            self._shards.start_sums()


# ---- Muon's work


def _share(
    ranks: Ranks, orthogonalise: Orthogonalise, directions: list[Tensor], stacks: Sequence[Stack]
) -> Iterable[Tensor]:
    """A `ShareWork` of ranks that each keep some rows of every matrix; dealt as `matrices.share_over` does it."""
    dealt = deal([len(stack.members) for stack in stacks], ranks.world)
    journeys = [_Journey(*of_stack, ranks) for of_stack in zip(stacks, directions, dealt, strict=True)]
    for journey in journeys:
        journey.turn(orthogonalise)
    return (journey.rows() for journey in journeys)


class _Journey:
    """The matrices of one stack on their way to the ranks that work on them, and back. `kept` are this rank's rows of
    all of them, member by member, hence also rank by rank: `shares` says which members each rank works on."""

    def __init__(self, stack: Stack, kept: Tensor, shares: list[slice], ranks: Ranks) -> None:
        mine = stack.members[shares[ranks.rank]]
        self._shape = (len(mine), stack.rows, stack.cols)
        self._spans = [[_span(rank, ranks.world, member) for member in mine] for rank in range(ranks.world)]
        self._kept = [sum(stack.kept_rows[share]) for share in shares]
        """Rows that this rank keeps of each rank's members."""
        self._met = [sum(map(_length, spans)) for spans in self._spans]
        """Rows that each rank keeps of this rank's members."""
        self._sent = kept  # until all have it
        self._received = kept.new_empty(sum(self._met), stack.cols)
        self._work = _start_exchange(self._received, self._sent, self._met, self._kept)

    def turn(self, orthogonalise: Orthogonalise) -> None:
        """Work on the matrices that have come, and begin to send them back."""
        self._work.wait()
        X = orthogonalise(self._matrices())
        parts = [x[span] for spans in self._spans for x, span in zip(X, spans, strict=True)]
        self._sent = torch.cat(parts) if parts else X.new_empty(0, self._shape[2])
        self._received = X.new_empty(sum(self._kept), self._shape[2])
        self._work = _start_exchange(self._received, self._sent, self._kept, self._met)

    def rows(self) -> Tensor:
        self._work.wait()
        return self._received

    def _matrices(self) -> Tensor:
        """From the rows of all ranks: (own members, r, c)."""
        if not self._shape[0]:
            return self._received.new_empty(self._shape)
        parts = self._received.split([_length(span) for spans in self._spans for span in spans])
        by_member = (parts[member :: self._shape[0]] for member in range(self._shape[0]))
        return torch.cat(list(chain.from_iterable(by_member))).view(self._shape)


def _span(rank: int, world: int, member: Member) -> slice:
    """Which rows of a matrix a rank keeps."""
    own = rows_of(rank, world, len(member.param))
    first, end = (min(max(row, member.start), member.stop) - member.start for row in (own.start, own.stop))
    return slice(first, end)


def _length(span: slice) -> int:
    return int(span.stop - span.start)


def _start_exchange(received: Tensor, sent: Tensor, to_come: list[int], to_go: list[int]) -> dist.Work:
    """Begin to send runs of rows, one to each rank, and to receive one from each."""
    work: dist.Work = dist.all_to_all_single(received, sent, to_come, to_go, async_op=True)
    return work
