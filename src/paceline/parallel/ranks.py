"""Who this process is among those of a run, and the few things that all of them do together.

torchrun starts the processes and sets their ranks in the environment. Rank 0 alone writes files and prints. A single
process uses the same class: every method returns at once and there is no process group. CPU tensors travel by gloo,
also beside NCCL, so that processes can agree on something without waiting for a GPU.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.core.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """`rank` of `world`, and the number among those on the same machine."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world}"

    @property
    def is_main(self) -> bool:
        """Whether this is the one that writes files and prints."""
        return self.rank == 0

    def sum_(self, values: Tensor) -> Tensor:
        """Replace `values` by their sum over all ranks. On a GPU nothing waits but the stream."""
        if self.world > 1:
            dist.all_reduce(values)
        return values

    def largest_(self, values: Tensor) -> Tensor:
        """Replace `values` by the largest of all ranks."""
        if self.world > 1:
            dist.all_reduce(values, dist.ReduceOp.MAX)
        return values

    def from_first(self, find: Callable[[], T]) -> T:
        """What `find` returns on the first rank, which alone calls it."""
        found = [find() if self.is_main else None]
        if self.world > 1:
            dist.broadcast_object_list(found, src=0)
        return cast(T, found[0])

    def to_first(self, value: T) -> list[T]:
        """What every rank gives, in rank order, on the first; nothing on the others."""
        if self.world == 1:
            return [value]
        found: list[T | None] | None = [None] * self.world if self.is_main else None
        dist.gather_object(value, found, dst=0)
        return cast(list[T], found or [])

    def wait_for_all(self) -> None:
        self.sum_(torch.zeros(()))


SINGLE_PROCESS = Ranks()


def ranks_from_environment() -> Ranks:
    """This process's place as torchrun sets it; alone without torchrun."""
    if "LOCAL_RANK" not in os.environ:  # cluster managers may set the others for the whole machine
        return SINGLE_PROCESS
    found = {name: os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    if not all(value.isdecimal() for value in found.values()):
        values = ", ".join(f"{name}={value!r}" for name, value in found.items())
        raise ConfigError(f"{values}: torchrun sets all three to numbers; unset them or start with torchrun")
    return Ranks(*map(int, found.values()))


def launch_name() -> str | None:
    """The same through all restarts of one torchrun, on all its machines; None if it makes no restarts."""
    if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0":
        return None
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return f"torchrun {os.getppid()}" if run_id == "none" else f"--rdzv-id {run_id}"  # none: on one machine


def start_gather(received: Tensor, sent: Tensor) -> dist.Work:
    """Begin to gather every rank's `sent`, all of one shape, into `received`, one after another by rows."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
    work: dist.Work = gather(received, sent, async_op=True)
    return work


class DeferredAny:
    """OR over ranks, one call late: a call posts this rank's value and returns the result of the call before, so that
    no rank waits for a GPU or for a rank that is less than a step behind. Alone, there is no delay."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._posted: tuple[Tensor, dist.Work] | None = None

    def __call__(self, value: bool) -> bool:
        if self._ranks.world == 1:
            return value
        before, flag = self._posted, torch.tensor(int(value))
        work = dist.all_reduce(flag, dist.ReduceOp.MAX, async_op=True)
        assert work is not None
        self._posted = flag, work
        if before is None:
            return False
        before[1].wait()
        return bool(before[0])
