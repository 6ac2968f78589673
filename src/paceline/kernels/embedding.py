"""Rows of a table, with a gradient that has the same bits every time (`train.deterministic` on a GPU).

The plain twin is `F.embedding`, whose gradient on a GPU is added up in whatever order threads come once it is compiled.
Here tokens are sorted, equal ones in the order of their places, and each row of the gradient is the sum of one segment,
by one thread a column, in fp32. Costs a sort of the tokens and an fp32 copy of their gradients; a token that is a tenth
of the text makes one long segment. On a CPU `F.embedding` adds in order, so this is not used there, only tested.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def look_up_sorted(tokens: Tensor, table: Tensor) -> Tensor:
    """`F.embedding`: tokens of any shape, table (rows, width) -> (*tokens, width) in the table's dtype."""
    rows: Tensor = _look_up(tokens, table)
    return rows


@torch.library.custom_op("paceline::look_up_sorted", mutates_args=())
def _look_up(tokens: Tensor, table: Tensor) -> Tensor:
    return F.embedding(tokens, table)


@torch.library.custom_op("paceline::sorted_row_sums", mutates_args=())
def sorted_row_sums(grad: Tensor, tokens: Tensor, rows: int) -> Tensor:
    """For each row of a table the sum of the gradients of its tokens, (rows, width) in the gradient's dtype: grad (N,
    width), tokens (N,). An operator, so that the compiler leaves the order alone. Waits for nothing."""
    ordered, places = tokens.sort(stable=True)
    ends = torch.arange(rows + 1, dtype=ordered.dtype, device=tokens.device)
    segments = torch.searchsorted(ordered, ends)  # where each row's tokens begin
    sums = torch.segment_reduce(grad[places].float(), "sum", offsets=segments, axis=0, unsafe=True)
    return sums.to(grad.dtype)


@_look_up.register_fake
def _(tokens, table):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    return table.new_empty(*tokens.shape, table.size(1))


@sorted_row_sums.register_fake
def _(grad, tokens, rows):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    return grad.new_empty(rows, grad.size(1))


def _keep(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
    tokens, table = inputs
    ctx.save_for_backward(tokens)
    ctx.rows = table.size(0)


def _backward(ctx, grad):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    (tokens,) = ctx.saved_tensors
    return None, sorted_row_sums(grad.flatten(0, -2), tokens.flatten(), ctx.rows)


_look_up.register_autograd(_backward, setup_context=_keep)
