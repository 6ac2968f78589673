"""Muon's work dealt over ranks: each orthogonalises some matrices of every stack, as one batch, and all gather them.

A stack's matrices go to ranks in equal runs; those left over, one to a rank, begin with the rank after the last of the
stack before. A stack travels while the next one is worked on. It costs a copy of each stack, and 170 MB a step on the
wire for record 18 in bf16, the iteration's own format.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from paceline.optim.rule import Orthogonalise, ShareWork, all_here
from paceline.optim.rules.muon import Stack
from paceline.parallel.ranks import Ranks, start_gather


def share_muon_work(ranks: Ranks) -> ShareWork:
    return all_here if ranks.world == 1 else partial(_share, ranks)


def deal(counts: Sequence[int], world: int) -> list[list[slice]]:
    """For each stack of so many matrices, which of them each rank works on: rank by rank, all of them once."""
    dealt, turn = [], 0
    for count in counts:
        each, left_over = divmod(count, world)
        sizes = [each + ((rank - turn) % world < left_over) for rank in range(world)]
        dealt.append([slice(stop - size, stop) for size, stop in zip(sizes, accumulate(sizes), strict=True)])
        turn += left_over
    return dealt


def _share(
    ranks: Ranks, orthogonalise: Orthogonalise, directions: list[Tensor], _: Sequence[Stack]
) -> Iterable[Tensor]:
    """A `ShareWork`. Every rank ends with the same bits, since each matrix is computed once."""
    dealt = deal([len(stack) for stack in directions], ranks.world)
    pairs = zip(directions, dealt, strict=True)
    gathers = [_Gather(orthogonalise(stack[shares[ranks.rank]]), shares) for stack, shares in pairs]
    return (gather.stack() for gather in gathers)


class _Gather:
    """One stack on its way: `own` are this rank's matrices, `shares` says which ranks have which."""

    def __init__(self, own: Tensor, shares: list[slice]) -> None:
        self._sizes = [share.stop - share.start for share in shares]
        run = max(self._sizes)
        self._sent = own.contiguous() if len(own) == run else filled_up(own, run)  # kept until all have it
        self._received = own.new_empty(len(shares) * run, *own.shape[1:])
        self._work = start_gather(self._received, self._sent)

    def stack(self) -> Tensor:
        self._work.wait()
        runs = self._received.chunk(len(self._sizes))
        return torch.cat([run[:size] for run, size in zip(runs, self._sizes, strict=True)])


def filled_up(own: Tensor, run: int) -> Tensor:
    """The rows with others behind them that nobody reads, `run` in all."""
    whole = own.new_empty(run, *own.shape[1:])
    whole[: len(own)] = own
    return whole
