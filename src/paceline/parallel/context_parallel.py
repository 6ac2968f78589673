"""One sequence split over ranks (`parallel.context_parallel`): each holds a slice of every sequence of its micro-batch.

In every layer a slice fetches a halo from the ranks to its left, the keys and values that its first queries see, as
long as the widest window; gradients of a halo go back the same way. Attention is any back end's: it is given the halo
before the slice, with queries of zero whose results are thrown away (record 18 in two slices: 5 % more queries). Slices
are whole blocks of 128, so a window counted in blocks cuts where it did. Not compiled: a compiler that sees no use of a
result, such as the first rank's empty halo, may leave out an exchange that another rank waits for.
"""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from paceline.model.attention import Attend, Plan
from paceline.parallel.batch_split import RankSlice
from paceline.parallel.ranks import Ranks
from paceline.settings.backends import reach_tokens
from paceline.settings.model import LayerConfig, ModelConfig
from paceline.settings.parallel import ParallelConfig

Sizes = list[tuple[int, int]]  # (rank of the group, tokens that it and this one exchange), the nearest first


def context_parallel_plan(plan: Plan, place: RankSlice, ranks: Ranks, config: ParallelConfig) -> Plan:
    """A back end's plan for slices. All ranks call this together: those of one sequence get a group of their own, so
    that halos and gradients do not wait in one line."""
    timeout = timedelta(seconds=config.timeout_s)
    firsts = range(0, ranks.world, place.parts)
    groups = [dist.new_group(list(range(first, first + place.parts)), timeout=timeout) for first in firsts]
    group: dist.ProcessGroup = groups[place.run]

    def planned(model: ModelConfig, documents_BT: Tensor | None, tokens: int, windows: Tensor) -> Attend:
        reach = max(reach_tokens(model, place.parts * tokens, kind) for kind in model.windows)
        sizes = halo_sizes(place.part, tokens, reach)
        halo = sum(sizes)
        if documents_BT is not None:
            documents_BT = _continued(_from_left(documents_BT, reach, group), documents_BT, sizes)
        attend = plan(model, documents_BT, halo + tokens, windows)

        def attend_slice(layer: LayerConfig, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            halves = _from_left(torch.cat([k, v], dim=-1), reach, group)
            left_k, left_v = halves.split([k.size(-1), v.size(-1)], dim=-1)
            q = F.pad(q, (0, 0, 0, 0, halo, 0))
            return attend(layer, q, torch.cat([left_k, k], dim=1), torch.cat([left_v, v], dim=1))[:, halo:]

        return attend_slice

    return planned


def halo_sizes(part: int, tokens: int, reach: int) -> list[int]:
    """Tokens that slice number `part` fetches from each slice to its left, the farthest first."""
    sizes = [min(tokens, reach - distance * tokens) for distance in range(part)]  # nearest first
    return [size for size in reversed(sizes) if size > 0]


def _continued(halo_BT: Tensor, own_BT: Tensor, sizes: list[int]) -> Tensor:
    """Document ids of halo and slice as one rising sequence; each rank has counted from 0 at its slice's start."""
    parts, opened = [], torch.zeros_like(own_BT[:, :1])
    for ids in (*halo_BT.split(sizes, dim=1), own_BT) if sizes else (own_BT,):
        parts.append(ids + opened)
        opened = opened + ids[:, -1:]
    return torch.cat(parts, dim=1)


class _FromLeft(torch.autograd.Function):
    """The `reach` tokens before this rank's x (B, T, ...), as far as there are any, from the ranks that have them. All
    ranks of a sequence call it together, in both passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, reach: int, group: dist.ProcessGroup) -> Tensor:
        ctx.tokens, ctx.reach, ctx.group = x.size(1), reach, group
        left, right = _neighbours(group, x.size(1), reach)
        fetched = _exchange(group, [(peer, x[:, x.size(1) - size :]) for peer, size in right], left, x)
        return torch.cat([x[:, :0], *reversed(fetched)], dim=1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        """The halo's gradient to the ranks that it came from; what others send back, added up."""
        left, right = _neighbours(ctx.group, ctx.tokens, ctx.reach)
        pieces = grad.split([size for _, size in reversed(left)], dim=1) if left else ()
        sends = [(peer, piece) for (peer, _), piece in zip(left, reversed(pieces), strict=True)]
        total = grad.new_zeros(grad.size(0), ctx.tokens, *grad.shape[2:])
        for piece in _exchange(ctx.group, sends, right, grad):
            total[:, ctx.tokens - piece.size(1) :] += piece
        return total, None, None


def _from_left(x: Tensor, reach: int, group: dist.ProcessGroup) -> Tensor:
    found: Tensor = _FromLeft.apply(x, reach, group)  # type: ignore[no-untyped-call]
    return found


def _neighbours(group: dist.ProcessGroup, tokens: int, reach: int) -> tuple[Sizes, Sizes]:
    """To the left and to the right."""
    me, world = dist.get_rank(group), dist.get_world_size(group)
    left, right = (enumerate(reversed(halo_sizes(n, tokens, reach)), start=1) for n in (me, world - 1 - me))
    return [(me - distance, size) for distance, size in left], [(me + distance, size) for distance, size in right]


def _exchange(group: dist.ProcessGroup, sends: list[tuple[int, Tensor]], fetch: Sizes, like: Tensor) -> list[Tensor]:
    """Send each tensor to its rank of the group; return the tokens fetched from each rank of `fetch`, shaped `like`."""
    fetched = [(peer, like.new_empty(like.size(0), tokens, *like.shape[2:])) for peer, tokens in fetch]
    operations = [
        dist.P2POp(action, tensor.contiguous(), group=group, group_peer=peer)
        for action, pairs in ((dist.isend, sends), (dist.irecv, fetched))
        for peer, tensor in pairs
    ]
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
    return [tensor for _, tensor in fetched]
