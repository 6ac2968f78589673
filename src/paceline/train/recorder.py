"""From device values to records, without making the device wait.

A loss is copied to the host while the device goes on; its record is written as soon as the copy has arrived, in order.
Only `flush` waits, and it is called where the loop waits anyway: before a validation, a checkpoint and at the end.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from paceline.metrics.records import StepRecord
from paceline.metrics.sinks import Sink


class Recorder:
    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._pending: deque[tuple[StepRecord, Tensor, Callable[[], bool]]] = deque()

    def step(self, record: StepRecord, loss: Tensor) -> None:
        """Take a record whose loss is still on the device."""
        self._pending.append((record, *_copy_to_host(loss)))
        while self._pending and self._pending[0][2]():
            self._write_oldest()

    def flush(self) -> None:
        """Wait for every outstanding value and write its record."""
        if self._pending and torch.cuda.is_available():
            torch.cuda.synchronize()
        while self._pending:
            self._write_oldest()

    def _write_oldest(self) -> None:
        record, loss, _ = self._pending.popleft()
        self._sink.step(replace(record, train_loss=float(loss)))


def _copy_to_host(value: Tensor) -> tuple[Tensor, Callable[[], bool]]:
    """A host copy of a 0-D tensor, and a test of whether it has arrived."""
    if value.device.type != "cuda":
        return value, lambda: True
    host = torch.empty((), dtype=value.dtype, pin_memory=True)
    host.copy_(value, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()
    return host, arrived.query
