"""Muon: momentum, then the nearest orthogonal matrix, then a step scaled by shape.

Matrices of one shape form a stack (n, r, c) that moves as one batch; momentum lives in the stack, weights and gradients
stay where the model has them and are gathered at each step (a copy of the gradients, small beside the products). A
fused matrix enters as its parts, each a member of the stack of its own shape and scaled by that shape: it is then the
same optimizer as for separate matrices. A matrix without a gradient counts as one whose gradient is zero, so that every
rank and every step does the same work; with no momentum yet its update is zero. Where processes share parameters by
rows, momentum and moves are of the rows that are kept here, and only `ShareWork` ever sees a whole matrix.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor, nn

from paceline.optim.config import MuonConfig
from paceline.optim.slots import Slot
from paceline.optim.tables import AllHere, Tables

Orthogonalise = Callable[[Tensor], Tensor]
"""Directions (n, r, c) to orthogonal factors (n, r, c), each matrix independent of the others."""
ShareWork = Callable[[Orthogonalise, list[Tensor], Sequence["Stack"]], Iterable[Tensor]]
"""Decides which process orthogonalises which matrices, given the direction of every stack as its momentum is laid out.
The work is done when it returns; the result of a stack, in the same layout, may still be on its way until it is
taken."""


def all_here(orthogonalise: Orthogonalise, directions: list[Tensor], _: Sequence["Stack"]) -> list[Tensor]:
    """The `ShareWork` of a single process."""
    return [orthogonalise(stack) for stack in directions]


def nesterov_(
    momentum_buffer: Tensor, grads: Tensor, momentum: float | Tensor, *, form: Literal["sum", "average"]
) -> Tensor:
    """Take the gradients into the momentum buffer, in place, and return the look-ahead direction U.

    sum: b ← μb + G, U = G + μb. average: the same with (1-μ)G for G. `grads` has the buffer's shape and dtype."""
    fresh = grads if form == "sum" else grads * (1.0 - momentum)
    momentum_buffer.mul_(momentum).add_(fresh)
    return fresh + momentum_buffer * momentum


def shape_factor(rows: int, cols: int, rule: Literal["longest_side", "aspect"]) -> float:
    """Factor on the rate of a matrix: its update has singular values near 1, which a large matrix spreads thin."""
    return math.sqrt(max(rows, cols)) if rule == "longest_side" else math.sqrt(max(1.0, rows / cols))


@dataclass(frozen=True, eq=False)  # itself alone: tensors do not compare to one truth value
class Member:
    """The rows of a parameter that move as one matrix: all of them, or one part of a fused matrix."""

    param: nn.Parameter
    start: int
    stop: int
    tables: Tables

    @property
    def kept(self) -> slice:
        """Those of them that this process keeps, as rows of all that it keeps of the parameter."""
        own = self.tables.rows(self.param) or slice(0, len(self.param))
        first, end = (min(max(row, own.start), own.stop) - own.start for row in (self.start, self.stop))
        return slice(first, end)

    def weight(self) -> Tensor:
        return self.tables.own(self.param, self.param.detach())[self.kept]

    def grad(self) -> Tensor:
        if self.param.grad is None:
            return torch.zeros_like(self.weight())
        return self.tables.own(self.param, self.param.grad)[self.kept]


class Stack:
    """Members of one shape, dtype and device, with their momentum as one buffer of fp32 or wider: (n, r, c) or, where
    processes share them by rows, the kept rows of all members one after another, (k, c)."""

    def __init__(self, members: list[Member]) -> None:
        self.members = members
        self.rows, self.cols = members[0].stop - members[0].start, members[0].param.shape[1]
        weights = self.weights()
        self.kept_rows = [len(weight) for weight in weights]
        self.whole = all(member.tables.rows(member.param) is None for member in members)
        shape = (len(members), self.rows) if self.whole else (sum(self.kept_rows),)
        dtype = torch.promote_types(weights[0].dtype, torch.float32)
        self.momentum = torch.zeros(*shape, self.cols, dtype=dtype, device=weights[0].device)

    def grads(self, skip: Tensor | None = None) -> Tensor:
        """Laid out as the momentum is, a copy; zeros where `skip` is true (zero times what is not finite would not be
        zero)."""
        join = torch.stack if self.whole else torch.cat
        grads = join([member.grad() for member in self.members]).to(self.momentum.dtype)
        return grads if skip is None else grads.masked_fill_(skip, 0.0)

    def weights(self) -> list[Tensor]:
        return [member.weight() for member in self.members]

    def by_member(self, of_all: Tensor) -> tuple[Tensor, ...]:
        """What is laid out as the momentum is, a view for each member."""
        return of_all.unbind(0) if self.whole else of_all.split(self.kept_rows)


def move_(stack: Stack, X: Tensor, *, lr: float | Tensor, factor: float, weight_decay: float) -> None:
    """M ← M (1 - lr·wd) - lr·factor·X for each matrix M, in place. The decay does not see the shape factor."""
    weights = stack.weights()
    updates = X.to(weights[0].dtype) * (lr * factor)
    if weight_decay:
        torch._foreach_mul_(weights, 1.0 - lr * weight_decay)
    torch._foreach_sub_(weights, stack.by_member(updates))


class Muon:
    """The matrices that Muon moves. Buffers exist from construction on; nothing is kept outside this object."""

    def __init__(
        self,
        params: Mapping[str, nn.Parameter],
        config: MuonConfig,
        *,
        parts: Mapping[str, int | Sequence[int]],
        orthogonalise: Orthogonalise,
        share_work: ShareWork = all_here,
        tables: Tables | None = None,
    ) -> None:
        self.config = config
        self.orthogonalise = orthogonalise
        self.share_work = share_work
        shared = tables or AllHere()
        members = {name: _members(name, param, parts.get(name, 1), shared) for name, param in params.items()}
        self.stacks = _stacks(member for group in members.values() for member in group)
        slot_of = dict(
            pair for stack in self.stacks for pair in zip(stack.members, stack.by_member(stack.momentum), strict=True)
        )
        self.slots = {name: _slot([slot_of[member] for member in group], group[0]) for name, group in members.items()}

    def step(
        self,
        *,
        lr: float | Tensor,
        momentum: float | Tensor,
        skip: Tensor | None = None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """`meanwhile` is called when this process has done its share and others' results may be on their way. Where
        `skip` (0-D bool) is true, the step is one with no gradient, a momentum of 1 and a rate of 0: nothing changes,
        by the same work. Else it is, to the bit, the step without it."""
        form, rule = self.config.momentum_form, self.config.scale_rule
        if skip is not None:
            keep = (~skip).double()  # as wide as Python's numbers, so that the products below are the same
            lr, momentum = lr * keep, momentum * keep + skip
        directions = [nesterov_(stack.momentum, stack.grads(skip), momentum, form=form) for stack in self.stacks]
        orthogonal = self.share_work(self.orthogonalise, directions, self.stacks)
        meanwhile()
        for stack, X in zip(self.stacks, orthogonal, strict=True):
            factor = shape_factor(stack.rows, stack.cols, rule)
            move_(stack, X, lr=lr, factor=factor, weight_decay=self.config.weight_decay)

    def state(self) -> dict[str, Slot]:
        return {f"muon.momentum.{name}": slot for name, slot in self.slots.items()}


def _slot(buffers: list[Tensor], of: Member) -> Slot:
    rows = of.tables.rows(of.param)
    return Slot(buffers) if rows is None else Slot(buffers, of.param, rows)


def _members(name: str, param: nn.Parameter, parts: int | Sequence[int], tables: Tables) -> list[Member]:
    """The matrices inside one parameter: `parts` equal ones, or one for each number of rows."""
    if param.ndim != 2:
        raise ValueError(f"{name} has shape {tuple(param.shape)}, but Muon moves matrices; put it in another class")
    rows = param.shape[0]
    sizes = [rows // parts] * parts if isinstance(parts, int) else list(parts)
    if sum(sizes) != rows:
        raise ValueError(f"{name} has {rows} rows, which do not make {parts} parts; give the rows of each part")
    return [Member(param, stop - size, stop, tables) for size, stop in zip(sizes, accumulate(sizes), strict=True)]


def _stacks(members: Iterable[Member]) -> list[Stack]:
    """Members by shape, dtype and device, in the order in which they first appear."""
    groups: dict[tuple[int, int, torch.dtype, torch.device], list[Member]] = {}
    for member in members:
        param = member.param
        shape = member.stop - member.start, param.shape[1]
        groups.setdefault((*shape, param.dtype, param.device), []).append(member)
    return [Stack(group) for group in groups.values()]
