"""Parameters that several processes share, as the optimizer meets them; `parallel/embedding_sync.py` and
`parallel/fsdp.py` share them."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn


class ParamSync:
    """The answers here are those of a single process, which keeps all rows and waits for nobody."""

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
