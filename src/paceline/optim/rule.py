"""What an optimizer rule is, what it keeps, and how one is found: a rule is a module of `optim/rules` with a class
`Rule` and its `FACTS`, literal numbers that are read without importing it (`settings.groups.rules`)."""

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from paceline.settings import plugins
from paceline.settings.groups import GroupSettings, ParamGroup
from paceline.settings.optim import MuonConfig

Orthogonalise = Callable[[Tensor], Tensor]
"""Directions (n, r, c) to orthogonal factors (n, r, c), each matrix independent of the others."""
ShareWork = Callable[[Orthogonalise, list[Tensor], Sequence[Any]], Iterable[Tensor]]
"""Decides which process orthogonalises which matrices, given the direction of every stack as its momentum is laid out.
The result of a stack, in the same layout, may still be on its way until it is taken."""


UpdateRows = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, "Event"], None]
"""(table, second moments, last updates, ids (N,), gradients (N, width), event): one update of the rows `ids`, in place.
The gradients of an id that repeats add up; negative ids are nobody's."""


def all_here(orthogonalise: Orthogonalise, directions: list[Tensor], _: Sequence[Any]) -> list[Tensor]:
    """The `ShareWork` of a single process."""
    return [orthogonalise(stack) for stack in directions]


class ParamSync:
    """Parameters that several processes share (`parallel/embedding_sync.py`, `parallel/fsdp.py`), as a rule meets them.
    The answers here are those of a single process, which keeps all rows and waits for nobody."""

    def await_gradients(self) -> None:
        """Return when every deferred `.grad` is the sum over all processes. Again in the same step, at once."""

    def is_deferred(self, param: Tensor) -> bool:
        """Whether its gradient may still be on its way after the backward pass."""
        return False

    def rows(self, param: Tensor) -> slice | None:
        """The rows that this process keeps slots of and updates; None: all."""
        return None

    def own(self, param: Tensor, of: Tensor) -> Tensor:
        """Those rows of the parameter itself or of its gradient, as a view."""
        return of

    def grad(self, param: nn.Parameter) -> Tensor:
        """The own rows of its gradient; zeros where it has none."""
        return torch.zeros_like(self.own(param, param.detach())) if param.grad is None else self.own(param, param.grad)

    def norm(self, params: Iterable[nn.Parameter]) -> Tensor:
        """`global_norm` of these parameters' whole gradients, the same on every process."""
        return global_norm([param.grad for param in params if param.grad is not None])

    def gather_rows(self, ids: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Row gradients of all processes one after another; ids (N,) and rows (N, width) of each."""
        return ids, rows

    def start_gather(self, param: Tensor) -> None:
        """The own rows are updated; begin to fill in those of the others."""

    def finish_gathers(self) -> None:
        """Return when every gathered parameter is whole."""

    def whole(self, own: Tensor, param: Tensor) -> Tensor:
        """A new tensor of the parameter's shape from every process's own rows; all processes call this together."""
        return own.clone()


def global_norm(tensors: list[Tensor]) -> Tensor:
    """Norm of all tensors as one vector, summed in fp32 whatever their dtype; 0-D, without waiting for the device."""
    norm: Tensor = torch.linalg.vector_norm(norms_of(tensors))
    return norm


def norms_of(tensors: list[Tensor]) -> Tensor:
    """Norm of each tensor, summed in fp32 whatever its dtype, (n,)."""
    return torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float32)) if tensors else torch.zeros(0)


@dataclass(frozen=True, kw_only=True)
class RuleContext:
    """What a rule may need besides its group."""

    orthogonalise: Orthogonalise
    muon: MuonConfig = field(default_factory=MuonConfig)
    parts: Mapping[str, Sequence[int]] = field(default_factory=dict)  # rows of each matrix stacked in a parameter
    share_work: ShareWork = all_here
    update_rows: UpdateRows | None = None  # None: the plain twin
    sync: ParamSync = field(default_factory=ParamSync)


@dataclass(frozen=True, kw_only=True)
class Event:
    """One update of a group."""

    settings: GroupSettings
    step: int  # updates of this group, this one included, of which ...
    skipped: Tensor | None = None  # ... so many were none, 0-D fp32 on the device
    skip: Tensor | None = None
    """0-D bool on the device: where it is true, weights and slots stay as they are, whatever the gradients hold."""
    rows: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Of parameters with row gradients: ids (N,), and gradients (N, width) that add up where an id repeats; negative
    ids are nobody's."""


@dataclass(frozen=True, eq=False)  # itself alone: tensors do not compare to one truth value
class Slot:
    """One parameter's state of one kind (momentum, a moment), under one name in a checkpoint however it is kept."""

    pieces: list[Tensor]  # buffers that follow each other by rows, in stacks of different shapes perhaps
    param: Tensor | None = None
    rows: slice | None = None
    """Of the parameter's state, if only these are kept here and other processes have the rest; None: all."""

    @property
    def shape(self) -> torch.Size:
        """Of the whole."""
        if self.rows is not None and self.param is not None:
            return self.param.shape
        first = self.pieces[0]
        return first.shape if len(self.pieces) == 1 else torch.Size([sum(map(len, self.pieces)), *first.shape[1:]])

    @property
    def dtype(self) -> torch.dtype:
        return self.pieces[0].dtype

    def kept(self) -> Tensor:
        """What is here, as one tensor; of one piece, the buffer itself."""
        return self.pieces[0] if len(self.pieces) == 1 else torch.cat(self.pieces)

    def fill(self, whole: Tensor) -> None:
        """Take what is kept here from the whole, into the buffers."""
        kept = whole if self.rows is None else whole[self.rows]
        parts = [kept] if len(self.pieces) == 1 else kept.split([len(piece) for piece in self.pieces])  # may be 0-D
        for piece, part in zip(self.pieces, parts, strict=True):
            piece.copy_(part)


class Rule(Protocol):
    """Moves the parameters of one group. Slots exist from construction on, so that a checkpoint finds them."""

    def __init__(self, group: ParamGroup, params: Mapping[str, nn.Parameter], context: RuleContext) -> None: ...

    def start(self, event: Event) -> Callable[[], None]:
        """Do the work that needs gradients; the function returned completes the update, after other groups' work."""

    def state(self) -> dict[str, Slot]:
        """Every slot by its name in a checkpoint."""


def find_rule(name: str) -> type[Rule]:
    """Of a plug-in, or of `optim/rules/<name>.py`; `settings.groups` refuses names without one."""
    found: type[Rule] | None = plugins.find("rules", name)
    return found or cast(type[Rule], importlib.import_module(f"paceline.optim.rules.{name}").Rule)


def no_more() -> None:
    """What `Rule.start` returns where nothing is left to do."""
