"""Checkpoints on the disk: written to a temporary folder, hashed, flushed, renamed, then the oldest are pruned.
docs/resume.md lists the files of one. `Saver` writes beside the training; `store.py` loads. Nothing is ever pickled."""

import contextlib
import os
import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.manifest import CONFIG, STATE, FileEntry, write_manifest
from paceline.checkpoint.run_folder import RunFolder, step_of
from paceline.checkpoint.tensors import write_group
from paceline.core.errors import PacelineError
from paceline.core.files import blake2b_of, make_room, sync_folder, write_json


@dataclass(frozen=True)
class Checkpoint:
    """A state of a run. Tensors are plain or, until a snapshot gathers them, DTensors."""

    step: int
    groups: Mapping[str, Mapping[str, Tensor]]
    """By name: `model`, `optimizer`, `random` (of every rank), `buffers`, and a group for each hook with a state."""
    state: Mapping[str, Any]  # JSON values: data cursor, metrics position, clocks
    config: Mapping[str, Any] | None = None  # the run's whole config; format 1 kept none

    @property
    def model(self) -> Mapping[str, Tensor]:
        return self.groups["model"]


def save(run: RunFolder, checkpoint: Checkpoint, *, keep: int) -> Path:
    """Publish a checkpoint and prune all but the newest `keep`. A failure leaves the earlier ones as they were."""
    final = run.checkpoint(checkpoint.step)
    temporary = final.with_name(f".{final.name}.{os.getpid()}.tmp")
    try:
        for leftover in final.parent.glob(".step_*.tmp"):  # of a save that was killed
            shutil.rmtree(leftover, ignore_errors=True)
        temporary.mkdir(parents=True)
        _write(temporary, checkpoint)
        if final.exists():
            shutil.rmtree(final)
        os.rename(temporary, final)
        sync_folder(final.parent)
    except Exception as error:
        with contextlib.suppress(OSError):
            shutil.rmtree(temporary)
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        then = f"the checkpoint before it is intact, {make_room(error)}continue with --resume {run.path}"
        raise PacelineError(f"{final}: could not be saved ({reason}); {then}") from error
    for old in (*run.checkpoints()[:-keep], *run.set_aside()):
        shutil.rmtree(old, ignore_errors=True)
    with contextlib.suppress(OSError):
        run.beginning.unlink()
    return final


def _write(folder: Path, checkpoint: Checkpoint) -> None:
    files: list[FileEntry] = []
    for group, tensors in checkpoint.groups.items():
        if tensors:
            files += write_group(folder, group, tensors)
    for path, value in ((folder / STATE, checkpoint.state), (folder / CONFIG, checkpoint.config)):
        if value is not None:
            write_json(path, value)
            files.append(FileEntry(name=path.name, bytes=path.stat().st_size, blake2b=blake2b_of(path)))
    write_manifest(folder, checkpoint.step, files)


def set_aside_after(run: RunFolder, step: int) -> None:
    """Rename checkpoints after `step`, damaged or left behind by a run that goes on from there, until the next save."""
    for folder in run.checkpoints():
        if step_of(folder) > step:
            aside = folder.with_name(f"set_aside_{folder.name}")
            shutil.rmtree(aside, ignore_errors=True)
            os.rename(folder, aside)


class Saver:
    """Saves beside the training: a copy of the state on the host, then a thread that writes and publishes it.

    The training waits for the copy (on a GPU into pinned memory, which is kept from save to save), and for the save
    before, if that is not done yet. What goes wrong in the thread is raised by the next call here. Used as a context:
    leaving it waits for the last save."""

    def __init__(self, run: RunFolder, *, keep: int, writes: bool = True) -> None:
        """`writes`: whether this process keeps and writes what is saved; others only help to gather DTensors."""
        self._run, self._keep, self._writes = run, keep, writes
        self._buffers: dict[str, Tensor] = {}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[Path] | None = None

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, kind: object, error: object, at: object) -> None:
        try:
            if error is None:
                self.wait()
        finally:
            self._thread.shutdown()  # a save that has begun is finished whatever the reason for leaving
            self._buffers.clear()

    def save(self, checkpoint: Checkpoint) -> None:
        """Begin to save; the state may change as soon as this returns. All ranks call it if any tensor is a DTensor."""
        self.wait()
        copied = {group: self._copied(group, tensors) for group, tensors in checkpoint.groups.items()}
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()  # the copies are queued behind what the step still does
        if self._writes:
            self._pending = self._thread.submit(save, self._run, replace(checkpoint, groups=copied), keep=self._keep)

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
        """One at a time: what all ranks gather of a DTensor need not be on the device beside all others."""
        found: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            if self._writes:
                found[name] = self._buffer(f"{group}/{name}", whole).copy_(whole.detach(), non_blocking=True)
        return found

    def _buffer(self, name: str, like: Tensor) -> Tensor:
        if name not in self._buffers:
            self._buffers[name] = torch.empty(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)
        return self._buffers[name]
