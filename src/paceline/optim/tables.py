"""Parameters that several processes share, as the optimizer meets them: the large tables (embeddings, head), or all of
them. The other side is `parallel/tables.py` and `parallel/shards.py`; a process that is alone keeps all rows and has
nobody to wait for."""

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor, nn


class Tables(Protocol):
    """Where the optimizer asks. A table is known by its parameter."""

    def await_gradients(self) -> None:
        """Return when every table's `.grad` is the sum over all processes. Again in the same step, at once."""

    def rows(self, table: Tensor) -> slice | None:
        """The rows that this process keeps moments of and updates; None: all, and so for any other parameter."""

    def own(self, table: Tensor, of: Tensor) -> Tensor:
        """Those rows of the parameter itself or of its gradient, as a view."""

    def norm(self, params: Iterable[nn.Parameter]) -> Tensor:
        """`global_norm` of these parameters' whole gradients, the same on every process."""

    def start_gather(self, table: Tensor) -> None:
        """The own rows are updated; begin to fill in those of the others."""

    def finish_gathers(self) -> None:
        """Return when every gathered table is whole."""

    def whole(self, own: Tensor, table: Tensor) -> Tensor:
        """A new tensor of the table's shape from every process's own rows of it; all processes call this together."""


class AllHere:
    """The `Tables` of a single process."""

    def await_gradients(self) -> None:
        pass

    def rows(self, table: Tensor) -> slice | None:
        return None

    def own(self, table: Tensor, of: Tensor) -> Tensor:
        return of

    def norm(self, params: Iterable[nn.Parameter]) -> Tensor:
        return global_norm([param.grad for param in params if param.grad is not None])

    def start_gather(self, table: Tensor) -> None:
        pass

    def finish_gathers(self) -> None:
        pass

    def whole(self, own: Tensor, table: Tensor) -> Tensor:
        return own.clone()


def global_norm(tensors: list[Tensor]) -> Tensor:
    """Norm of all tensors as one vector, summed in fp32 whatever their dtype; 0-D, without waiting for the device."""
    norm: Tensor = torch.linalg.vector_norm(norms_of(tensors))
    return norm


def norms_of(tensors: list[Tensor]) -> Tensor:
    """Norm of each tensor, summed in fp32 whatever its dtype, (n,)."""
    return torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float32)) if tensors else torch.zeros(0)
