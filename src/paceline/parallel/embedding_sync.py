"""The large tables (embeddings, head) over ranks: their gradients are exchanged last, and their rows may be shared out.

Tables are most of the bytes and come last in a backward pass. One sum per table begins when the last backward pass has
ended and travels while Muon works; Adam alone waits for it. Under `parallel.zero1` each rank keeps the moments of a run
of rows and updates those; the others' are gathered while Muon works. Adam is elementwise, so the bits stay the same.
Dropped: scattering the sum of the gradients, which leaves no rank with the gradient that clipping looks at.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from paceline.optim.rule import ParamSync, ShareWork
from paceline.parallel.muon_sharding import filled_up, share_muon_work
from paceline.parallel.ranks import Ranks, start_gather


class DeferredAllReduce(ParamSync):
    """Parameters whose gradients are added up by themselves, after the last backward pass of a step."""

    def __init__(self, params: Iterable[nn.Parameter], ranks: Ranks) -> None:
        self.params = list(params)
        self._ranks = ranks
        self._sums: list[dist.Work] = []
        self.before_sums: Callable[[], object] = lambda: None  # when gradients are this rank's own for the last time

    def start_sums(self) -> None:
        self.before_sums()
        for param in self.params:
            if param.grad is not None:
                work = dist.all_reduce(param.grad, async_op=True)
                assert work is not None
                self._sums.append(work)

    def await_gradients(self) -> None:
        while self._sums:
            self._sums.pop(0).wait()

    def is_deferred(self, param: Tensor) -> bool:
        return self._ranks.world > 1 and any(param is deferred for deferred in self.params)

    def whole(self, own: Tensor, param: Tensor) -> Tensor:
        found = own.new_empty(param.shape)
        found[rows_of(self._ranks.rank, self._ranks.world, len(found))] = own
        _RowGather(found, self._ranks).wait()
        return found

    def gather_rows(self, ids: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Every rank's row gradients in rank order, so that each rank forms the same sums."""
        if self._ranks.world == 1:
            return ids, rows
        all_ids, all_rows = (t.new_empty(self._ranks.world * len(t), *t.shape[1:]) for t in (ids, rows))
        for work in [start_gather(all_ids, ids.contiguous()), start_gather(all_rows, rows.contiguous())]:
            work.wait()
        return all_ids, all_rows


class EmbeddingSync(DeferredAllReduce):
    """Of ranks that each have every parameter whole."""

    forward_is_collective = False  # whether a forward pass needs all ranks

    def __init__(self, tables: Iterable[nn.Parameter], ranks: Ranks, *, sharded: bool) -> None:
        super().__init__(tables, ranks)
        self._sharded = {id(table) for table in self.params} if sharded and ranks.world > 1 else set()
        self._gathers: list[_RowGather] = []

    def share_work(self) -> ShareWork:
        return share_muon_work(self._ranks)

    def rows(self, param: Tensor) -> slice | None:
        return rows_of(self._ranks.rank, self._ranks.world, len(param)) if id(param) in self._sharded else None

    def own(self, param: Tensor, of: Tensor) -> Tensor:
        return of if (rows := self.rows(param)) is None else of[rows]

    def start_gather(self, param: Tensor) -> None:
        self._gathers.append(_RowGather(param.detach(), self._ranks))

    def finish_gathers(self) -> None:
        while self._gathers:
            self._gathers.pop(0).wait()


def part_here(tensor: Tensor) -> Tensor:
    """Of a DTensor, the part that this rank keeps; a plain tensor is all here."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def rows_of(rank: int, world: int, rows: int) -> slice:
    """Equal runs, rank by rank, but for the last ranks where they do not divide: these have fewer rows or none."""
    run = -(-rows // world)
    return slice(min(rank * run, rows), min((rank + 1) * run, rows))


def put_rows(target: Any, whole: Any) -> None:
    """Fill a parameter from all of its rows, a DTensor with its own; `whole` is a tensor or a slice of a file."""
    if not hasattr(target, "to_local"):
        target.copy_(whole[...])
        return
    mesh = target.device_mesh
    target.to_local().copy_(whole[rows_of(mesh.get_local_rank(), mesh.size(), len(target))])


class _RowGather:
    """The other ranks' rows of a table: in place, or in a copy, where runs are not equal, as a gather wants them."""

    def __init__(self, table: Tensor, ranks: Ranks) -> None:
        self._table, rows = table, len(table)
        own, run = rows_of(ranks.rank, ranks.world, rows), -(-rows // ranks.world)
        self._received, self._sent = table, table[own]  # kept until all have it
        if run * ranks.world != rows:
            self._received = table.new_empty(run * ranks.world, *table.shape[1:])
            self._sent = filled_up(table[own], run)
        self._work = start_gather(self._received, self._sent)

    def wait(self) -> None:
        self._work.wait()
        if self._received is not self._table:
            self._table.copy_(self._received[: len(self._table)])
