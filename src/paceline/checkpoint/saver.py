"""Saving beside the training: a copy of the state on the host, then a thread that writes, hashes and publishes it.

The training waits for the copy alone (on a GPU into pinned memory, which is kept from save to save), and for the save
before, if that is not done yet. It costs as much host memory as the state takes. What goes wrong in the thread is
raised by the next call here. A process that is killed meanwhile leaves a temporary folder and the checkpoints before.
"""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint import store
from paceline.checkpoint.run_folder import RunFolder


class Saver:
    """Used as a context: leaving it waits for the last save."""

    def __init__(self, run: RunFolder, *, keep: int, writes: bool = True) -> None:
        """`writes`: whether this process keeps and writes what is saved; others only help to gather DTensors."""
        self._run, self._keep, self._writes = run, keep, writes
        self._buffers: dict[str, Tensor] = {}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[Path] | None = None

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if error is None:
                self.wait()
        finally:
            self._thread.shutdown()  # a save that has begun is finished whatever the reason for leaving
            self._buffers.clear()

    def save(self, checkpoint: store.Checkpoint) -> None:
        """Begin to save; the state may change as soon as this returns. All ranks call it if any tensor is a DTensor."""
        self.wait()
        copied: dict[str, Any] = {group: self._copied(group, getattr(checkpoint, group)) for group in store.GROUPS}
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()  # the copies are queued behind what the step still does
        if self._writes:
            self._pending = self._thread.submit(store.save, self._run, replace(checkpoint, **copied), keep=self._keep)

    def check(self) -> None:
        """Raise what a save that has ended meanwhile has to say."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def wait(self) -> None:
        """Return when nothing is being saved."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _copied(self, group: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """One at a time: what is gathered need not be on the device beside all others."""
        found = {}
        for name, tensor in tensors.items():
            whole = _gathered(tensor)
            if self._writes:
                found[name] = self._copy(f"{group}/{name}", whole)
        return found

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is None:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._buffers[name] = buffer
        return buffer.copy_(tensor, non_blocking=True)


def _gathered(tensor: Tensor) -> Tensor:
    """The whole of a DTensor, with all ranks' help; a plain tensor is whole."""
    gather = getattr(tensor, "full_tensor", None)
    return tensor.detach() if gather is None else gather().detach()
