"""Muon: momentum, then the nearest orthogonal matrix, then a step scaled by shape.

Matrices of one shape form a stack (n, r, c) that moves as one batch; momentum lives in the stack, weights and gradients
stay where the model has them (a copy of the gradients at each step, small beside the products). A fused matrix enters
as its parts, each a member of the stack of its own shape, so that it moves as separate matrices would. Where processes
share parameters by rows, momentum and moves are of the rows kept here, and only `ShareWork` sees a whole matrix.
"""

import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor, nn

from paceline.optim.rule import Event, ParamSync, RuleContext, Slot
from paceline.settings.groups import ParamGroup, RuleFacts

# an update holds all directions, and of the stack in hand gradients or iterates, which also cross memory
FACTS = RuleFacts(matrices=True, fp32_slots=1, fp32_update=2, crossings=8.0, orthogonal=True)


def nesterov_(
    momentum_buffer: Tensor, grads: Tensor, momentum: float | Tensor, *, form: Literal["sum", "average"]
) -> Tensor:
    """Take the gradients into the momentum buffer b, in place, and return the look-ahead direction U. sum: b ← μb + G,
    U = G + μb. average: the same with (1-μ)G for G."""
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
    sync: ParamSync

    @property
    def kept(self) -> slice:
        """Those of them that this process keeps, as rows of all that it keeps of the parameter."""
        own = self.sync.rows(self.param) or slice(0, len(self.param))
        first, end = (min(max(row, own.start), own.stop) - own.start for row in (self.start, self.stop))
        return slice(first, end)

    def weight(self) -> Tensor:
        return self.sync.own(self.param, self.param.detach())[self.kept]

    def grad(self) -> Tensor:
        return self.sync.grad(self.param)[self.kept]


class Stack:
    """Members of one shape, dtype and device, with their momentum in fp32 or wider: (n, r, c) or, where processes share
    them by rows, the kept rows of all members one after another, (k, c)."""

    def __init__(self, members: list[Member]) -> None:
        self.members = members
        self.power: Tensor | None = None
        self.rows, self.cols = members[0].stop - members[0].start, members[0].param.shape[1]
        weights = self.weights()
        self.kept_rows = [len(weight) for weight in weights]
        self.whole = all(member.sync.rows(member.param) is None for member in members)
        shape = (len(members), self.rows) if self.whole else (sum(self.kept_rows),)
        dtype = torch.promote_types(weights[0].dtype, torch.float32)
        self.momentum = torch.zeros(*shape, self.cols, dtype=dtype, device=weights[0].device)

    def keep_power(self) -> None:
        """Mean squares for `evened`, on the long side of the matrices; fp32."""
        sides = (self.rows, 1) if self.rows >= self.cols else (1, self.cols)
        self.power = torch.zeros(len(self.members), *sides, device=self.momentum.device)

    def grads(self, skip: Tensor | None = None) -> Tensor:
        """Laid out as the momentum is, a copy; zeros where `skip` is true, whatever they hold."""
        join = torch.stack if self.whole else torch.cat
        grads = join([member.grad() for member in self.members]).to(self.momentum.dtype)
        return grads if skip is None else grads.masked_fill_(skip, 0.0)

    def weights(self) -> list[Tensor]:
        return [member.weight() for member in self.members]

    def by_member(self, of_all: Tensor) -> tuple[Tensor, ...]:
        """What is laid out as the momentum is, a view for each member."""
        return of_all.unbind(0) if self.whole else of_all.split(self.kept_rows)


def move_(
    stack: Stack, X: Tensor, *, lr: float | Tensor, factor: float, weight_decay: float, cautious: bool = False
) -> None:
    """M ← M (1 - lr·wd) - lr·factor·X for each matrix M, in place. `cautious`: M ← M - lr·factor·(X + lr·wd·M where X
    and M have one sign or one is 0)."""
    weights = stack.weights()
    updates = X.to(weights[0].dtype)
    if weight_decay and cautious:
        M = torch.stack(weights) if stack.whole else torch.cat(weights)
        updates = updates + torch.where(updates * M >= 0, M * (lr * weight_decay), 0.0)
    elif weight_decay:
        torch._foreach_mul_(weights, 1.0 - lr * weight_decay)
    torch._foreach_sub_(weights, stack.by_member(updates * (lr * factor)))


def evened(X: Tensor, power: Tensor, rate: float | Tensor) -> Tensor:
    """NorMuon: X (n, r, c) with each row over the root of its mean square, averaged over steps in `power` (n, r, 1),
    which moves by `rate`; then each matrix at the norm that it had. Wide matrices by columns, `power` (n, 1, c)."""
    X = X.to(power.dtype)
    power.lerp_(X.square().mean(dim=-1 if power.size(-1) == 1 else -2, keepdim=True), rate)
    scaled = X * power.clamp(min=1e-10).rsqrt()
    norm, before = (torch.linalg.matrix_norm(of, keepdim=True) for of in (scaled, X))
    found: Tensor = scaled * (before / norm.clamp(min=1e-30))
    return found


class Rule:
    def __init__(self, group: ParamGroup, params: Mapping[str, nn.Parameter], context: RuleContext) -> None:
        self._context, self.config = context, context.muon
        members = {name: _members(name, p, context.parts.get(name, ()), context.sync) for name, p in params.items()}
        apart = context.muon.mlp_output_rate != 1.0
        ends = {each for name, group in members.items() for each in group if apart and name.endswith("mlp.down")}
        self.stacks = _stacks((member for group in members.values() for member in group), ends)
        slot_of = dict[Member, Tensor]()
        for stack in self.stacks:
            slot_of |= zip(stack.members, stack.by_member(stack.momentum), strict=True)
        self._slots = {
            name: Slot([slot_of[member] for member in group], params[name], context.sync.rows(params[name]))
            for name, group in members.items()
        }
        self._names = {member: f"{name}.{n}" for name, group in members.items() for n, member in enumerate(group)}
        for stack in self.stacks if self.config.row_beta2 is not None else ():
            stack.keep_power()
        self._factors = [
            shape_factor(stack.rows, stack.cols, self.config.scale_rule)
            * (self.config.mlp_output_rate if stack.members[0] in ends else 1.0)
            for stack in self.stacks
        ]

    def start(self, event: Event) -> Callable[[], None]:
        """A skipped step is one with no gradient, a momentum of 1 and a rate of 0."""
        s, skip = event.settings, event.skip
        lr: float | Tensor = s.lr
        momentum: float | Tensor = s.momentum
        rate: float | Tensor = 1.0 - (self.config.row_beta2 or 0.0)
        if skip is not None:
            keep = (~skip).double()  # as wide as Python's numbers, so that the products below are the same
            lr, momentum, rate = lr * keep, momentum * keep + skip, rate * keep
        form, context = self.config.momentum_form, self._context
        directions = [nesterov_(stack.momentum, stack.grads(skip), momentum, form=form) for stack in self.stacks]
        orthogonal = context.share_work(context.orthogonalise, directions, self.stacks)

        def finish() -> None:
            cautious = self.config.cautious_decay
            for stack, factor, X in zip(self.stacks, self._factors, orthogonal, strict=True):
                update = X if stack.power is None else evened(X, stack.power, rate)
                move_(stack, update, lr=lr, factor=factor, weight_decay=s.weight_decay, cautious=cautious)

        return finish

    def state(self) -> dict[str, Slot]:
        slots = {f"muon.momentum.{name}": slot for name, slot in self._slots.items()}
        for stack in self.stacks:
            powers = () if stack.power is None else zip(stack.members, stack.power, strict=True)
            slots |= {f"muon.power.{self._names[member]}": Slot([power]) for member, power in powers}
        return slots


def _members(name: str, param: nn.Parameter, parts: Sequence[int], sync: ParamSync) -> list[Member]:
    """One for each number of rows in `parts`, or the parameter as one."""
    sizes = list(parts) or [param.shape[0]]
    if sum(sizes) != param.shape[0]:
        raise ValueError(f"{name} has {param.shape[0]} rows, which do not make parts of {', '.join(map(str, sizes))}")
    return [Member(param, stop - size, stop, sync) for size, stop in zip(sizes, accumulate(sizes), strict=True)]


def _stacks(members: Iterable[Member], ends: Container[Member]) -> list[Stack]:
    """Members by shape, dtype and device, in the order in which they first appear; those in `ends` apart."""
    groups: dict[tuple[int, int, torch.dtype, torch.device, bool], list[Member]] = {}
    for member in members:
        param, rows = member.param, member.stop - member.start
        groups.setdefault((rows, param.shape[1], param.dtype, param.device, member in ends), []).append(member)
    return [Stack(group) for group in groups.values()]
