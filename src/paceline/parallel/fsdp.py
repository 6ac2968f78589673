"""FSDP (`parallel.fsdp`): every rank keeps its rows of every matrix and table, of its gradient and slots.

By torch's `fully_shard`: a block is gathered while it runs, in both passes; embeddings and lm_head stay through both.
Gradients are added up and dealt out once a step; between micro-batches every rank holds them whole. Scalars stay whole.
Adam moves a rank's own rows. Of a Muon matrix, the rows of its direction travel to the rank that orthogonalises it and
back. `rows_of` is also torch's rule. At the start every process makes the whole model in the host's memory.
"""

import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from paceline.model.gpt import GPT
from paceline.optim.rule import Orthogonalise, ShareWork, global_norm
from paceline.optim.rules.muon import Member, Stack
from paceline.parallel.embedding_sync import DeferredAllReduce, part_here, rows_of
from paceline.parallel.muon_sharding import deal
from paceline.parallel.ranks import Ranks


def apply_fsdp(model: GPT, device: torch.device, whole: Collection[str] = ()) -> None:
    """Leave this rank its rows of every matrix and table of a model that all ranks have alike, on `device`; scalars and
    the parameters named in `whole` stay whole."""
    assert dist.group.WORLD is not None
    mesh = DeviceMesh.from_group(dist.group.WORLD, device.type)
    scalars = {parameter for name, parameter in model.named_parameters() if parameter.dim() < 2 or name in whole}
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


class FsdpSync(DeferredAllReduce):
    """Of a model after `apply_fsdp`: torch does not add up the gradients of scalars, and a forward pass gathers what it
    needs, so there is nothing to gather after an update."""

    forward_is_collective = True

    def __init__(self, model: nn.Module, ranks: Ranks, whole: Collection[str] = ()) -> None:
        """`whole`: parameters with row gradients, which no sum of dense ones includes."""
        deferred = (p for n, p in model.named_parameters() if not isinstance(p, DTensor) and n not in whole)
        super().__init__(deferred, ranks)

    def share_work(self) -> ShareWork:
        return partial(_share, self._ranks)

    def rows(self, param: Tensor) -> slice | None:
        return rows_of(self._ranks.rank, self._ranks.world, len(param)) if isinstance(param, DTensor) else None

    def own(self, param: Tensor, of: Tensor) -> Tensor:
        return part_here(of)

    def norm(self, params: Iterable[nn.Parameter]) -> Tensor:
        grads = [param.grad for param in params if param.grad is not None]
        shared = global_norm([grad.to_local() for grad in grads if isinstance(grad, DTensor)]).square()
        whole = global_norm([grad for grad in grads if not isinstance(grad, DTensor)]).square()
        return (self._ranks.sum_(shared) + whole).sqrt()


def _share(
    ranks: Ranks, orthogonalise: Orthogonalise, directions: list[Tensor], stacks: Sequence[Stack]
) -> Iterable[Tensor]:
    """A `ShareWork` of ranks that each keep some rows of every matrix."""
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
        self._kept = [sum(stack.kept_rows[share]) for share in shares]  # rows of each rank's members that are kept here
        self._met = [sum(span.stop - span.start for span in spans) for spans in self._spans]  # and of ours, there
        self._start(kept, self._met, self._kept)

    def turn(self, orthogonalise: Orthogonalise) -> None:
        """Work on the matrices that have come, and begin to send them back."""
        self._work.wait()
        X = orthogonalise(self._matrices())
        parts = [x[span] for spans in self._spans for x, span in zip(X, spans, strict=True)]
        self._start(torch.cat(parts) if parts else X.new_empty(0, self._shape[2]), self._kept, self._met)

    def rows(self) -> Tensor:
        self._work.wait()
        return self._received

    def _start(self, sent: Tensor, to_come: list[int], to_go: list[int]) -> None:
        """Begin to send runs of rows, one to each rank, and to receive one from each."""
        self._sent = sent  # kept until all have it
        self._received = sent.new_empty(sum(to_come), self._shape[2])
        self._work: dist.Work = dist.all_to_all_single(self._received, sent, to_come, to_go, async_op=True)

    def _matrices(self) -> Tensor:
        """From the rows of all ranks: (own members, r, c)."""
        if not self._shape[0]:
            return self._received.new_empty(self._shape)
        parts = self._received.split([span.stop - span.start for spans in self._spans for span in spans])
        by_member = (parts[member :: self._shape[0]] for member in range(self._shape[0]))
        return torch.cat(list(chain.from_iterable(by_member))).view(self._shape)


def _span(rank: int, world: int, member: Member) -> slice:
    """Which rows of a matrix a rank keeps."""
    own = rows_of(rank, world, len(member.param))
    first, end = (min(max(row, member.start), member.stop) - member.start for row in (own.start, own.stop))
    return slice(first, end)
