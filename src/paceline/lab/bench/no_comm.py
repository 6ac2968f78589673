"""Steps of a rank that waits for nobody, to tell how much of a step is communication that is not hidden."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

EXCHANGES = (
    "all_reduce",
    "all_gather_into_tensor",
    "all_gather_single",  # the same since torch 2.13, and so below
    "reduce_scatter_tensor",
    "reduce_scatter_single",
    "all_to_all_single",
)
"""All that ranks do together in a step, ours and torch's own shards alike; but for halos, which are pairs of sends."""


class _Done:
    """The work of an exchange that was over when it began."""

    def __init__(self, received: Tensor) -> None:
        self._received = received

    def wait(self) -> bool:
        return True

    def get_future(self) -> Future[list[Tensor]]:
        future: Future[list[Tensor]] = Future()
        future.set_result([self._received])
        return future


def _at_once(*tensors: Tensor, async_op: bool = False, **named: Any) -> _Done | None:
    """In all of them what is received comes first, if it is not given by name."""
    received = tensors[0] if tensors else next(named[name] for name in ("output", "output_tensor") if name in named)
    return _Done(received) if async_op else None


@contextlib.contextmanager
def no_communication() -> Iterator[None]:
    """While the block runs, every exchange is over at once and moves nothing: what a rank would have received is
    whatever lay there. It computes as much as before, on numbers that mean nothing any more."""
    replaced: dict[str, Any] = {name: _at_once for name in EXCHANGES if hasattr(dist, name)}
    with patch.multiple(dist, **replaced, batch_isend_irecv=lambda _: []):
        yield
