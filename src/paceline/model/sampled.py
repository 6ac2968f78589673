"""A sampled softmax: training computes the logits of some ids only, the same ones for all tokens of a sequence.

The candidates of a sequence are all of its targets, filled up to a fixed number with ids from a sweep over the whole
vocabulary, which goes on from sequence to sequence, so that each id comes round equally often. A sequence belongs to
the global batch, so micro-batches and ranks do not change its candidates. Probabilities are those among the candidates,
without correction: losses are too low by what the other ids would have had, and a run should end with all of them.
Every shape is fixed and nothing waits for the device. Validation always uses all ids.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from paceline.core.errors import ConfigError
from paceline.model.loss import HeadLoss, Losses

if TYPE_CHECKING:
    from paceline.model.gpt import GPT

SWEEP_STRIDE = 20_011
"""The sweep is SWEEP_STRIDE k mod ids for k = 0, 1, ...; a prime, so it takes every id unless it divides their
number."""
SWEPT_SHARE = 8  # from sequence to sequence the sweep starts 1/SWEPT_SHARE of the candidates further on


def check_candidates(targets: np.ndarray, count: int) -> None:
    """Raise ConfigError if so many candidates (0: all ids) do not hold the targets of each of these sequences."""
    for row in targets if count else ():
        if (distinct := int(np.count_nonzero(np.bincount(row[row >= 0])))) > count:
            why = f"do not hold the {distinct:,} distinct targets of a sequence of {len(row):,} tokens"
            raise ConfigError(f"--model.candidates (or stages: candidates) {count:,} {why}; use a tenth more than that")


class CandidateSampler(nn.Module):
    """Training sets `count`, the candidates of a sequence (0: all ids), for each step, and writes the number of the
    first sequence of a pass, counted from the start of the run, to `first_sequence`."""

    sweep: Tensor
    first_sequence: Tensor

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows, self.count = rows, 0
        self.register_buffer("sweep", torch.arange(rows) * SWEEP_STRIDE % rows, persistent=False)
        self.register_buffer("first_sequence", torch.zeros((), dtype=torch.int64), persistent=False)

    def losses(
        self, loss: HeadLoss, x: Tensor, head: Tensor, targets: Tensor, bounds: tuple[float | None, float]
    ) -> Tensor:
        """As `Losses.main`, of x (B, T, width), among the candidates of each sequence."""
        found = []
        for number, (row, wanted) in enumerate(zip(x, targets, strict=True)):
            candidates, places = self(wanted, number)
            found.append(loss(row, distinct_rows(head, candidates), places, *bounds))
        stacked = torch.stack(found)
        return stacked if stacked.dim() == 2 else stacked.sum()

    def forward(self, targets: Tensor, sequence: int) -> tuple[Tensor, Tensor]:
        """The candidates of the pass's sequence with this number, (count,) ascending, and its targets (T,) as places
        among them; targets below 0, which do not count, stay."""
        here, counted = targets.device, targets >= 0
        marked = torch.zeros(self.rows + 1, dtype=torch.bool, device=here)  # one more, for targets that do not count
        marked = marked.index_fill(0, torch.where(counted, targets, self.rows), True)[:-1]
        start = (self.first_sequence + sequence) * max(1, self.count // SWEPT_SHARE)
        order = self.sweep[(start + torch.arange(self.rows, device=here)) % self.rows]
        free = ~marked[order]
        fill = free & (free.cumsum(0) <= self.count - marked.sum())
        marked = marked.index_copy(0, order, marked[order] | fill)
        place = marked.cumsum(0) - 1
        slots = torch.where(marked, place, self.count)  # one more, for ids that are not candidates
        ids, empty = torch.arange(self.rows, device=here), targets.new_zeros(self.count + 1)
        return empty.scatter(0, slots, ids)[:-1], torch.where(counted, place[targets.clamp(min=0)], targets)


class _DistinctRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.rows = table.size(0)
        return table[ids]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (ids,) = ctx.saved_tensors
        return grad.new_zeros(ctx.rows, grad.size(1)).index_copy(0, ids, grad), None


def distinct_rows(table: Tensor, ids: Tensor) -> Tensor:
    """table[ids] for ids (N,) that are all different, so that the gradient is a copy and no sum."""
    rows: Tensor = _DistinctRows.apply(table, ids)  # type: ignore[no-untyped-call]
    return rows


class HeadApart(nn.Module):
    """A model whose stream is computed by `head_input`, its compiled form, and whose head is not compiled."""

    def __init__(self, model: "GPT", head_input: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.model, self.head_input = model, head_input

    def forward(self, tokens: Tensor, targets: Tensor, windows: Tensor) -> Losses:
        return self.model.losses(self.head_input(tokens, windows), tokens, targets)
