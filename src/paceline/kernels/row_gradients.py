"""Gradients of a table as rows with their indices, for tables too large for a dense gradient.

A backward pass appends one row of the gradient per looked-up token to buffers of fixed size, so that micro-batches
add up, a compiled graph and a CUDA graph can hold it, and nothing of the table's own size is ever made. Rows of one
index are summed by `coalesced`, in the order of the tokens and in fp32: the same bits every time. Costs a copy of the
looked-up rows per step, and a sort of their indices.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RowGradients(nn.Module):
    """What the backward passes of one step have left for a table of rows of `width`. Buffers are not saved: they are
    empty between steps."""

    ids: Tensor
    rows: Tensor
    count: Tensor

    def __init__(self, capacity: int, width: int, dtype: torch.dtype) -> None:
        """`capacity`: looked-up tokens of a step on this rank."""
        super().__init__()
        self.register_buffer("ids", torch.zeros(capacity, dtype=torch.int64), persistent=False)
        self.register_buffer("rows", torch.zeros(capacity, width, dtype=dtype), persistent=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64), persistent=False)

    def clear(self) -> None:
        """Forget the step."""
        self.count.zero_()
        self.rows.zero_()

    def gathered(self) -> tuple[Tensor, Tensor]:
        """All places: ids (capacity,) and rows (capacity, width). Places that no token took have the id -1 and a
        gradient of zero."""
        taken = torch.arange(self.ids.numel(), device=self.ids.device) < self.count
        return torch.where(taken, self.ids, -1), self.rows


def look_up_rows(tokens: Tensor, table: Tensor, store: RowGradients) -> Tensor:
    """`F.embedding` whose gradient goes to `store`; the table's `.grad` stays None."""
    rows: Tensor = _look_up(tokens, table, store.ids, store.rows, store.count)
    return rows


@torch.library.custom_op("paceline::look_up_rows", mutates_args=())
def _look_up(tokens: Tensor, table: Tensor, ids: Tensor, rows: Tensor, count: Tensor) -> Tensor:
    return F.embedding(tokens, table)


@_look_up.register_fake
def _(tokens, table, ids, rows, count):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    return table.new_empty(*tokens.shape, table.size(1))


@torch.library.custom_op("paceline::append_rows", mutates_args=("ids", "rows", "count"))
def append_rows(grad: Tensor, tokens: Tensor, ids: Tensor, rows: Tensor, count: Tensor) -> None:
    """Put grad (N, width) and tokens (N,) behind what is there. Waits for nothing."""
    places = count + torch.arange(tokens.numel(), device=tokens.device)
    ids.index_copy_(0, places, tokens.to(ids.dtype))
    rows.index_copy_(0, places, grad.to(rows.dtype))
    count += tokens.numel()


def _keep(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
    tokens, _, ids, rows, count = inputs
    ctx.save_for_backward(tokens)
    ctx.store = ids, rows, count


def _backward(ctx, grad):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    (tokens,) = ctx.saved_tensors
    append_rows(grad.flatten(0, -2), tokens.flatten(), *ctx.store)
    return None, None, None, None, None


_look_up.register_autograd(_backward, setup_context=_keep)


def coalesced(ids: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows summed by index, without waiting for the device: ids (N,) and rows (N, width) -> as many again, sorted by
    index, fp32. The distinct indices come first; what is left repeats the last of them, with the same sum. Rows of
    negative ids are zero and count for the last index."""
    ids = torch.where(ids < 0, ids.amax(), ids)
    ordered, order = ids.sort(stable=True)
    number = (ordered[1:] != ordered[:-1]).cumsum(0)
    number = torch.cat([torch.zeros_like(ordered[:1]), number])  # which distinct index each place has, from 0
    places = torch.arange(ids.numel() + 1, device=ids.device)
    starts = torch.searchsorted(number, places)
    sums = torch.segment_reduce(rows[order].float(), "sum", offsets=starts, axis=0, unsafe=True)
    kept = torch.minimum(places[:-1], number[-1])
    return ordered[starts[kept]], sums[kept]
