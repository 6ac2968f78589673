"""Muon: momentum, then the nearest orthogonal matrix, then a step scaled by shape.

Matrices of one shape form a stack (n, r, c) that moves as one batch; momentum lives in the stack, weights and gradients
stay where the model has them and are gathered at each step (a copy of the gradients, small beside the products). A
fused matrix enters as its parts, each a member of the stack of its own shape and scaled by that shape: it is then the
same optimizer as for separate matrices. A matrix without a gradient counts as one whose gradient is zero, so that every
rank and every step does the same work; with no momentum yet its update is zero.
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

Orthogonalise = Callable[[Tensor], Tensor]
"""Directions (n, r, c) to orthogonal factors (n, r, c), each matrix independent of the others."""
ShareWork = Callable[[Orthogonalise, list[Tensor]], Iterable[Tensor]]
"""Decides which process orthogonalises which matrices. The work is done when it returns; every stack, complete on every
process, may still be on its way until it is taken."""


def all_here(orthogonalise: Orthogonalise, directions: list[Tensor]) -> list[Tensor]:
    """The `ShareWork` of a single process."""
    return [orthogonalise(stack) for stack in directions]


def nesterov_(
    momentum_buffer: Tensor, grads: Tensor, momentum: float | Tensor, *, form: Literal["sum", "average"]
) -> Tensor:
    """Take the gradients into the momentum buffer, in place, and return the look-ahead direction U.

    sum: b ← μb + G, U = G + μb. average: the same with (1-μ)G for G. `grads` (n, r, c) in the buffer's dtype."""
    fresh = grads if form == "sum" else grads * (1.0 - momentum)
    momentum_buffer.mul_(momentum).add_(fresh)
    return fresh + momentum_buffer * momentum


def shape_factor(rows: int, cols: int, rule: Literal["longest_side", "aspect"]) -> float:
    """Factor on the rate of a matrix: its update has singular values near 1, which a large matrix spreads thin."""
    return math.sqrt(max(rows, cols)) if rule == "longest_side" else math.sqrt(max(1.0, rows / cols))


def move_(weights: list[Tensor], X: Tensor, *, lr: float | Tensor, factor: float, weight_decay: float) -> None:
    """M ← M (1 - lr·wd) - lr·factor·X for each matrix M, in place. The decay does not see the shape factor."""
    updates = X.to(weights[0].dtype) * (lr * factor)
    if weight_decay:
        torch._foreach_mul_(weights, 1.0 - lr * weight_decay)
    torch._foreach_sub_(weights, updates.unbind(0))


@dataclass(frozen=True, eq=False)  # itself alone: tensors do not compare to one truth value
class Member:
    """The rows of a parameter that move as one matrix: all of them, or one part of a fused matrix."""

    param: nn.Parameter
    start: int
    stop: int

    def weight(self) -> Tensor:
        return self.param.detach()[self.start : self.stop]

    def grad(self) -> Tensor:
        if self.param.grad is None:
            return torch.zeros_like(self.weight())
        return self.param.grad[self.start : self.stop]


class Stack:
    """Members of one shape, dtype and device, with their momentum as one (n, r, c) buffer of fp32 or wider."""

    def __init__(self, members: list[Member]) -> None:
        self.members = members
        like = members[0].weight()
        self.rows, self.cols = like.shape
        dtype = torch.promote_types(like.dtype, torch.float32)
        self.momentum = torch.zeros(len(members), self.rows, self.cols, dtype=dtype, device=like.device)

    def grads(self, skip: Tensor | None = None) -> Tensor:
        """As one stack, a copy; zeros where `skip` is true (zero times what is not finite would not be zero)."""
        grads = torch.stack([member.grad() for member in self.members]).to(self.momentum.dtype)
        return grads if skip is None else grads.masked_fill_(skip, 0.0)

    def weights(self) -> list[Tensor]:
        return [member.weight() for member in self.members]


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
    ) -> None:
        self.config = config
        self.orthogonalise = orthogonalise
        self.share_work = share_work
        members = {name: _members(name, param, parts.get(name, 1)) for name, param in params.items()}
        self.stacks = _stacks(member for group in members.values() for member in group)
        slot_of = dict(pair for stack in self.stacks for pair in zip(stack.members, stack.momentum, strict=True))
        self.slots = {name: [slot_of[member] for member in group] for name, group in members.items()}

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
        orthogonal = self.share_work(self.orthogonalise, directions)
        meanwhile()
        for stack, X in zip(self.stacks, orthogonal, strict=True):
            factor = shape_factor(stack.rows, stack.cols, rule)
            move_(stack.weights(), X, lr=lr, factor=factor, weight_decay=self.config.weight_decay)

    def state(self) -> dict[str, Slot]:
        return {f"muon.momentum.{name}": Slot(buffers) for name, buffers in self.slots.items()}


def _members(name: str, param: nn.Parameter, parts: int | Sequence[int]) -> list[Member]:
    """The matrices inside one parameter: `parts` equal ones, or one for each number of rows."""
    if param.ndim != 2:
        raise ValueError(f"{name} has shape {tuple(param.shape)}, but Muon moves matrices; put it in another class")
    rows = param.shape[0]
    sizes = [rows // parts] * parts if isinstance(parts, int) else list(parts)
    if sum(sizes) != rows:
        raise ValueError(f"{name} has {rows} rows, which do not make {parts} parts; give the rows of each part")
    return [Member(param, stop - size, stop) for size, stop in zip(sizes, accumulate(sizes), strict=True)]


def _stacks(members: Iterable[Member]) -> list[Stack]:
    """Members by shape, dtype and device, in the order in which they first appear."""
    groups: dict[tuple[torch.Size, torch.dtype, torch.device], list[Member]] = {}
    for member in members:
        weight = member.weight()
        groups.setdefault((weight.shape, weight.dtype, weight.device), []).append(member)
    return [Stack(group) for group in groups.values()]
