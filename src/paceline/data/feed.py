"""Batches from numpy to the device, one ahead of the computation.

On CUDA a batch is copied from pinned memory on a stream of its own while the step before it computes; handing it over
makes the current stream wait for that copy, never the host. The cost is one more batch in memory (6 MB for 524,288
tokens). On a CPU the tensors share the arrays' memory.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, from_numpy
from torch.cuda import Event, Stream

from paceline.data.corpus import Batch

Tag = TypeVar("Tag")


@dataclass(frozen=True, eq=False)
class DeviceBatch:
    """`Batch` on the device: `tokens` (S, T) int32, `targets` (S, T) int64."""

    tokens: Tensor
    targets: Tensor


def feed(stream: Iterable[tuple[Batch, Tag]], device: torch.device) -> Iterator[tuple[DeviceBatch, Tag]]:
    """Each batch on `device`, with whatever came with it (the cursor)."""
    host = ((DeviceBatch(from_numpy(batch.tokens), from_numpy(batch.targets)), tag) for batch, tag in stream)
    return _feed_cuda(host, device) if device.type == "cuda" else host


def _feed_cuda(host: Iterable[tuple[DeviceBatch, Tag]], device: torch.device) -> Iterator[tuple[DeviceBatch, Tag]]:
    copies = Stream(device)  # type: ignore[no-untyped-call]
    started = ((*_start_copy(batch, copies, device), tag) for batch, tag in host)
    ahead = next(started, None)
    while ahead is not None:
        batch, copied, tag = ahead
        ahead = next(started, None)
        current = torch.cuda.current_stream(device)
        current.wait_event(copied)
        batch.tokens.record_stream(current)  # tells the allocator that this stream uses the memory
        batch.targets.record_stream(current)
        yield batch, tag


def _start_copy(batch: DeviceBatch, copies: Stream, device: torch.device) -> tuple[DeviceBatch, Event]:
    with torch.cuda.stream(copies):
        tokens = batch.tokens.pin_memory().to(device, non_blocking=True)
        targets = batch.targets.pin_memory().to(device, non_blocking=True)
        return DeviceBatch(tokens, targets), copies.record_event()
