"""Adam by rows in one launch, for a GPU with Triton: a program for each distinct row sums its gradients, in the order
of the tokens, and updates the row. Plain twin: `optim.rules.adam_rows.update_plainly`, of some 25 launches, each with a
pass over memory. Here the bytes are those of the gradients and of the rows that are touched.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

AT_ONCE, WARPS = 4, 4
"""Gradients of a row that are loaded at a time."""


def update_rows(param: Tensor, square: Tensor, last: Tensor, ids: Tensor, rows: Tensor, event: Any) -> None:
    """As the plain twin, for the same `optim.rule.Event`."""
    s = event.settings
    ordered, order = ids.sort(stable=True)
    now = torch.full((), float(event.step), device=ids.device)
    if event.skipped is not None:
        now = now - event.skipped
    skip = torch.zeros((), dtype=torch.bool, device=ids.device) if event.skip is None else event.skip
    numbers = (s.lr, s.beta2, math.log(s.beta2) if s.beta2 > 0 else -1e30, s.eps, s.lr * s.weight_decay)
    tensors, sizes = (ordered, order, rows.contiguous(), param, square, last, now, skip), (ids.numel(), param.size(1))
    widest = triton.next_power_of_2(param.size(1))
    adam_row[(ids.numel(),)](*tensors, *sizes, *numbers, WIDTH=widest, AT_ONCE=AT_ONCE, num_warps=WARPS)


@triton.jit
def adam_row(
    ids_ptr, order_ptr, rows_ptr, param_ptr, square_ptr, last_ptr, now_ptr, skip_ptr, count, width,
    lr, beta2, log_beta2, eps, decay, WIDTH: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """The row of the id at this place, if it is the first such place; negative ids are nobody's."""
    place = tl.program_id(0)
    row = tl.load(ids_ptr + place)
    before = tl.load(ids_ptr + place - 1, mask=place > 0, other=-1)
    if (row != before) & (row >= 0) & (tl.load(skip_ptr) == 0):
        columns = tl.arange(0, WIDTH)
        inside = columns < width
        total = tl.zeros((WIDTH,), tl.float32)
        going = 1
        while going == 1:
            places = place + tl.arange(0, AT_ONCE)
            same = tl.load(ids_ptr + places, mask=places < count, other=-1) == row
            source = tl.load(order_ptr + places, mask=same, other=0)
            at = source[:, None] * width + columns[None, :]
            some = tl.load(rows_ptr + at, mask=same[:, None] & inside[None, :], other=0.0)
            total += tl.sum(some.to(tl.float32), axis=0)
            place += AT_ONCE
            going = tl.min(same.to(tl.int32), axis=0)
        now = tl.load(now_ptr)
        missed = now - tl.load(last_ptr + row).to(tl.float32)  # loaded by all warps before the sum below, stored after
        kept = tl.load(square_ptr + row) * tl.exp(missed * log_beta2)
        v = kept + (1.0 - beta2) * tl.sum(total * total, axis=0) / width
        old = tl.load(param_ptr + row * width + columns, mask=inside, other=0.0).to(tl.float32)
        update = lr * tl.sqrt(1.0 - tl.exp(now * log_beta2)) * total / (tl.sqrt(v) + eps)
        update += tl.where(update * old > 0, decay * old, 0.0)
        tl.store(param_ptr + row * width + columns, (old - update).to(param_ptr.dtype.element_ty), mask=inside)
        tl.store(square_ptr + row, v)
        tl.store(last_ptr + row, now.to(tl.int32))
