"""From device values to records, without making the device wait.

A record's values are copied to the host as one vector while the device goes on, and written once they have arrived.
Only `flush` waits, where the loop waits anyway: before a validation, a checkpoint and at the end.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.metrics.metrics_file import StepMetrics
from paceline.metrics.sinks import Sink

Values = dict[str, Tensor | int | None]  # name to value: 0-D tensors on any device, and what the host knows anyway


class _Pending(NamedTuple):
    record: StepMetrics
    names: tuple[str, ...]
    values: Tensor  # one per name, on the host once `arrived` says so
    arrived: Callable[[], bool]


class DeferredMetrics:
    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._pending: deque[_Pending] = deque()

    def step(self, record: StepMetrics, values: Values) -> None:
        """Take a record and its values: the tensor `train_loss`, and whatever else belongs into `extra`."""
        there = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        here = {name: value for name, value in values.items() if name not in there}
        copied, arrived = copy_to_host(torch.stack([value.float() for value in there.values()]))
        self._pending.append(_Pending(replace(record, extra=here), tuple(there), copied, arrived))
        while self._pending and self._pending[0].arrived():
            self._write_oldest()

    def flush(self) -> None:
        if self._pending and torch.cuda.is_available():
            torch.cuda.synchronize()
        while self._pending:
            self._write_oldest()

    def _write_oldest(self) -> None:
        oldest = self._pending.popleft()
        known = dict(zip(oldest.names, oldest.values.tolist(), strict=True))
        loss = known.pop("train_loss")
        self._sink.write(replace(oldest.record, train_loss=loss, extra={**oldest.record.extra, **known}))


def copy_to_host(values: Tensor) -> tuple[Tensor, Callable[[], bool]]:
    """A host copy of a vector, and a test of whether it has arrived."""
    if values.device.type != "cuda":
        return values, lambda: True
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()
    return host, arrived.query
