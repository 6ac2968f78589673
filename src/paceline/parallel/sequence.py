"""One sequence split over ranks (`parallel.split_sequence`): each holds a slice of every sequence of its micro-batch.

All of a model but attention works token by token, so that a slice only needs its true positions and, in every layer,
the keys and values that its first queries see to its left: a halo as long as the widest window, fetched from as many
ranks to the left as it reaches over. Gradients of a halo go back the same way. Attention itself is any back end's: it
is given the halo before the slice, with queries of zero for it whose results are thrown away. That is attention of as
many queries too many (record 18 in two slices of 32,768 tokens: 5 %), and spares every back end a second form.

Slices are whole blocks of 128, so a window counted in blocks cuts where it did. Document ids are compared with each
other only: those of the halo count on from where its ranks began, and the slice's own follow them.

Not compiled: a compiler that sees no use of a result may leave out an exchange that another rank waits for (the first
rank's empty halo was the case).
"""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from paceline.model.attention import Attend, Plan, reach_tokens
from paceline.model.config import ModelConfig
from paceline.parallel.config import ParallelConfig
from paceline.parallel.ranks import Ranks
from paceline.parallel.share import Place


def split_plan(plan: Plan, place: Place, ranks: Ranks, config: ParallelConfig) -> Plan:
    """A back end's plan for slices. All ranks call this together: those of one sequence get a group of their own, so
    that halos and gradients do not wait in one line."""
    group = _group_of(place, ranks, config)

    def planned(model: ModelConfig, documents_BT: Tensor | None, tokens: int, window: Tensor) -> Attend:
        reach = reach_tokens(model, place.parts * tokens)
        sizes = halo_sizes(place.part, tokens, reach)
        halo = sum(sizes)
        if documents_BT is not None:
            documents_BT = _continued(_from_left(documents_BT, reach, group), documents_BT, sizes)
        attend = plan(model, documents_BT, halo + tokens, window)

        def attend_slice(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            left_k, left_v = _from_left(torch.stack([k, v], dim=2), reach, group).unbind(2)
            q = F.pad(q, (0, 0, 0, 0, halo, 0))
            return attend(layer, q, torch.cat([left_k, k], dim=1), torch.cat([left_v, v], dim=1))[:, halo:]

        return attend_slice

    return planned


def halo_sizes(part: int, tokens: int, reach: int) -> list[int]:
    """Tokens that slice number `part` fetches from each slice to its left, the farthest first."""
    sizes = [min(tokens, reach - distance * tokens) for distance in range(part)]  # nearest first
    return [size for size in reversed(sizes) if size > 0]


def _group_of(place: Place, ranks: Ranks, config: ParallelConfig) -> dist.ProcessGroup:
    """The ranks that share this rank's sequences."""
    patience = timedelta(seconds=config.timeout_s)
    groups = [
        dist.new_group(list(range(first, first + place.parts)), timeout=patience)
        for first in range(0, ranks.world, place.parts)
    ]
    own: dist.ProcessGroup = groups[place.run]
    return own


def _continued(halo_BT: Tensor, own_BT: Tensor, sizes: list[int]) -> Tensor:
    """Document ids of halo and slice as one rising sequence; each rank has counted from 0 at its slice's start."""
    parts, opened = [], torch.zeros_like(own_BT[:, :1])
    for ids in (*halo_BT.split(sizes, dim=1), own_BT) if sizes else (own_BT,):
        parts.append(ids + opened)
        opened = opened + ids[:, -1:]
    return torch.cat(parts, dim=1)


class _FromLeft(torch.autograd.Function):
    """The `reach` tokens before this rank's x (B, T, ...), as far as there are any, from the ranks that have them. All
    ranks of a sequence are here together, in both passes: the first one has nothing to fetch and still sends."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, reach: int, group: dist.ProcessGroup) -> Tensor:
        ctx.tokens, ctx.reach, ctx.group = x.size(1), reach, group
        left, right = _neighbours(group, x.size(1), reach)
        sends = [(peer, x[:, x.size(1) - size :]) for peer, size in right]
        fetched = [(peer, _piece(x, size)) for peer, size in left]
        _exchange(group, sends, fetched)
        return torch.cat([x[:, :0], *(piece for _, piece in reversed(fetched))], dim=1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        """The halo's gradient to the ranks that it came from; what others send back, added up."""
        left, right = _neighbours(ctx.group, ctx.tokens, ctx.reach)
        pieces = grad.split([size for _, size in reversed(left)], dim=1) if left else ()
        sends = [(peer, piece) for (peer, _), piece in zip(left, reversed(pieces), strict=True)]
        fetched = [(peer, _piece(grad, size)) for peer, size in right]
        _exchange(ctx.group, sends, fetched)
        total = grad.new_zeros(grad.size(0), ctx.tokens, *grad.shape[2:])
        for _, piece in fetched:
            total[:, ctx.tokens - piece.size(1) :] += piece
        return total, None, None


def _from_left(x: Tensor, reach: int, group: dist.ProcessGroup) -> Tensor:
    found: Tensor = _FromLeft.apply(x, reach, group)  # type: ignore[no-untyped-call]
    return found


Sizes = list[tuple[int, int]]
"""(rank of the group, tokens that it and this one exchange), the nearest first."""


def _neighbours(group: dist.ProcessGroup, tokens: int, reach: int) -> tuple[Sizes, Sizes]:
    """To the left and to the right."""
    me, world = dist.get_rank(group), dist.get_world_size(group)
    left, right = (reversed(halo_sizes(others, tokens, reach)) for others in (me, world - 1 - me))
    return (
        [(me - distance, size) for distance, size in enumerate(left, start=1)],
        [(me + distance, size) for distance, size in enumerate(right, start=1)],
    )


def _piece(like: Tensor, tokens: int) -> Tensor:
    return like.new_empty(like.size(0), tokens, *like.shape[2:])


def _exchange(group: dist.ProcessGroup, sends: list[tuple[int, Tensor]], fetched: list[tuple[int, Tensor]]) -> None:
    """Send each tensor to its rank of the group and fill each of `fetched` from its own."""
    operations = [
        dist.P2POp(action, tensor.contiguous(), group=group, group_peer=peer)
        for action, pairs in ((dist.isend, sends), (dist.irecv, fetched))
        for peer, tensor in pairs
    ]
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
