"""The large tables (embeddings, head) as Adam meets them when several processes train together. The other side is
`parallel/tables.py`; a process that is alone keeps all rows and has nobody to wait for."""

from typing import Protocol

from torch import Tensor


class Tables(Protocol):
    """Where the optimizer asks. A table is known by its parameter."""

    def await_gradients(self) -> None:
        """Return when every table's `.grad` is the sum over all processes. Again in the same step, at once."""

    def rows(self, table: Tensor) -> slice | None:
        """The rows that this process keeps moments of and updates; None: all, and so for any other parameter."""

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

    def start_gather(self, table: Tensor) -> None:
        pass

    def finish_gathers(self) -> None:
        pass

    def whole(self, own: Tensor, table: Tensor) -> Tensor:
        return own.clone()
