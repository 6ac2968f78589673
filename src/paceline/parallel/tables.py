"""The large tables (embeddings, head) over ranks: their gradients are exchanged last, and their rows may be shared out.

A backward pass reaches the embeddings at its end, and they are most of the bytes. So they stay out of the buckets of
`gradients.py`: one sum per table begins when the last backward pass has ended and travels while Muon works on its
matrices, whose gradients came first; Adam alone waits for it. (An uncompiled run thereby gives up the overlap of the
head's sum with its backward pass; a compiled one has none.)

Under `parallel.shard_adam` each rank keeps the moments of a run of rows, updates those, and a gather brings the others'
while Muon moves the matrices. Adam is elementwise: the bits are those of every rank doing everything. Dropped: to
scatter the sum of the gradients too, which would save what the gather costs, but leaves no rank with the gradient that
clipping and the instruments look at.
"""

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.optim.muon import ShareWork
from paceline.optim.tables import global_norm
from paceline.parallel.matrices import share_over
from paceline.parallel.ranks import Ranks, start_gather


class LateSums:
    """Parameters whose gradients are added up by themselves, after the last backward pass of a step."""

    def __init__(self, params: Iterable[nn.Parameter], ranks: Ranks) -> None:
        self.params = list(params)
        self._ranks = ranks
        self._sums: list[dist.Work] = []
        self.before_sums: Callable[[], object] = lambda: None
        """Called when each of these gradients is this rank's own for the last time."""

    def start_sums(self) -> None:
        """Begin to add them up over the ranks."""
        if self._ranks.world == 1:
            return
        self.before_sums()
        for param in self.params:
            if param.grad is not None:
                work = dist.all_reduce(param.grad, async_op=True)
                assert work is not None
                self._sums.append(work)

    def await_gradients(self) -> None:
        while self._sums:
            self._sums.pop(0).wait()


class SharedTables(LateSums):
    """`optim.tables.Tables` of these ranks; alone, nothing is exchanged and all rows are kept."""

    passes_together = False
    """Whether a forward pass needs all ranks."""

    def __init__(self, tables: Iterable[nn.Parameter], ranks: Ranks, *, sharded: bool) -> None:
        super().__init__(tables, ranks)
        self._sharded = {id(table) for table in self.params} if sharded and ranks.world > 1 else set()
        self._gathers: list[_RowGather] = []

    def share_work(self) -> ShareWork:
        return share_over(self._ranks)

    def rows(self, table: Tensor) -> slice | None:
        return rows_of(self._ranks.rank, self._ranks.world, len(table)) if id(table) in self._sharded else None

    def own(self, table: Tensor, of: Tensor) -> Tensor:
        return of if (rows := self.rows(table)) is None else of[rows]

    def norm(self, params: Iterable[nn.Parameter]) -> Tensor:
        return global_norm([param.grad for param in params if param.grad is not None])

    def start_gather(self, table: Tensor) -> None:
        self._gathers.append(_RowGather(table.detach(), self._ranks))

    def finish_gathers(self) -> None:
        while self._gathers:
            self._gathers.pop(0).wait()

    def whole(self, own: Tensor, table: Tensor) -> Tensor:
        return gathered(own, table.shape, self._ranks)


def gathered(own: Tensor, shape: torch.Size, ranks: Ranks) -> Tensor:
    """A tensor of this shape from every rank's `rows_of` it."""
    found = own.new_empty(shape)
    found[rows_of(ranks.rank, ranks.world, len(found))] = own
    _RowGather(found, ranks).wait()
    return found


def part_here(tensor: Tensor) -> Tensor:
    """Of a DTensor, the part that this rank keeps; a plain tensor is all here."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def rows_of(rank: int, world: int, rows: int) -> slice:
    """Equal runs, rank by rank, but for the last ranks where they do not divide: these have fewer rows or none."""
    run = -(-rows // world)
    return slice(min(rank * run, rows), min((rank + 1) * run, rows))


class _RowGather:
    """A table on its way to being whole: each rank's own rows are in place, those of the others arrive. Equal runs
    arrive where they belong; others in a copy of the table, filled up, since a gather wants equal runs."""

    def __init__(self, table: Tensor, ranks: Ranks) -> None:
        self._table, rows = table, len(table)
        own, run = rows_of(ranks.rank, ranks.world, rows), -(-rows // ranks.world)
        self._sent = table[own]  # kept until all have it
        self._received = table
        if run * ranks.world != rows:
            self._received = table.new_empty(run * ranks.world, *table.shape[1:])
            self._sent = table.new_empty(run, *table.shape[1:])
            self._sent[: own.stop - own.start] = table[own]
        self._work = start_gather(self._received, self._sent)

    def wait(self) -> None:
        self._work.wait()
        if self._received is not self._table:
            self._table.copy_(self._received[: len(self._table)])
