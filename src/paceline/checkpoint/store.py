"""Checkpoints on the disk: written to a temporary folder, hashed, flushed, renamed, then the oldest are pruned.

A checkpoint is a folder of safetensors files by group (weights, optimizer slots, random states, guard), `state.json`
(data cursor, metrics position, clocks), `config.json`, and a manifest that vouches for all of them. Loading takes what
`manifest.newest_good` has verified. Nothing is ever unpickled. `saver.py` does the writing beside the training.
"""

import contextlib
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from paceline.checkpoint.manifest import CONFIG, STATE, FileEntry, read_manifest, write_manifest
from paceline.checkpoint.manifest import damage as damage
from paceline.checkpoint.manifest import newest_good as newest_good
from paceline.checkpoint.run_folder import RunFolder, step_of
from paceline.core.errors import PacelineError, RunError
from paceline.core.files import blake2b_of, make_room, sync_folder, write_json
from paceline.core.schema import read_json

GROUPS = ("model", "optimizer", "random", "guard")


@dataclass(frozen=True)
class Checkpoint:
    """A state of a run. Tensors are plain or, until a snapshot gathers them, DTensors."""

    step: int
    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    state: Mapping[str, Any]
    """JSON values: data cursor, metrics position, clocks."""
    random: Mapping[str, Tensor] = field(default_factory=dict)
    """Every random state of every rank (`random_states.py`)."""
    guard: Mapping[str, Tensor] = field(default_factory=dict)
    """What the guard against bad numbers remembers."""
    config: Mapping[str, Any] | None = None
    """The run's whole config; None: the checkpoint is of format 1, which kept none."""


def save(run: RunFolder, checkpoint: Checkpoint, *, keep: int) -> Path:
    """Publish a checkpoint and prune all but the newest `keep`. A failure leaves the earlier ones as they were."""
    final = run.checkpoint(checkpoint.step)
    temporary = final.with_name(f".{final.name}.{os.getpid()}.tmp")
    try:
        clear_temporary(run)
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
        raise PacelineError(
            f"{final}: could not be saved ({reason}); the checkpoint before it is intact, {make_room(error)}continue "
            f"with --resume {run.path}"
        ) from error
    _prune(run, keep)
    return final


def _write(folder: Path, checkpoint: Checkpoint) -> None:
    from paceline.checkpoint.tensors import write_group  # here: DCP takes 0.8 s to import

    files: list[FileEntry] = []
    for group in GROUPS:
        if tensors := getattr(checkpoint, group):
            files += write_group(folder, group, tensors)
    for name, value in ((STATE, checkpoint.state), (CONFIG, checkpoint.config)):
        if value is not None:
            write_json(folder / name, value)
            path = folder / name
            files.append(FileEntry(name=name, bytes=path.stat().st_size, blake2b=blake2b_of(path)))
    write_manifest(folder, checkpoint.step, files)


def clear_temporary(run: RunFolder) -> None:
    """Remove what a killed save has left."""
    for leftover in (run.path / "checkpoints").glob(".step_*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)


def _prune(run: RunFolder, keep: int) -> None:
    for old in (*run.checkpoints()[:-keep], *run.set_aside()):
        shutil.rmtree(old, ignore_errors=True)


def set_aside_after(run: RunFolder, step: int) -> None:
    """Take checkpoints after `step` out of the way of a run that goes on from there: damaged ones, or those it leaves
    behind. They keep their content until the next save, under another name."""
    for folder in run.checkpoints():
        if step_of(folder) > step:
            aside = folder.with_name(f"set_aside_{folder.name}")
            shutil.rmtree(aside, ignore_errors=True)
            os.rename(folder, aside)


def load(folder: Path, *, groups: Sequence[str] = GROUPS) -> Checkpoint:
    """Read a checkpoint that `newest_good` has verified, tensors to the host: those of `groups`, none of others."""
    from paceline.checkpoint.tensors import read_group

    manifest = read_manifest(folder)
    tensors = {group: read_group(folder, manifest.names(group)) if group in groups else {} for group in GROUPS}
    named = {entry.name for entry in manifest.files}
    return Checkpoint(
        step=manifest.step,
        state=_read_object(folder / STATE),
        config=_read_object(folder / CONFIG) if CONFIG in named else None,
        **tensors,
    )


def load_weights_into(folder: Path, weights: Mapping[str, Tensor]) -> None:
    """Fill a model's parameters in place, on whatever device and however sharded."""
    from paceline.checkpoint.tensors import read_group_into

    read_group_into(folder, read_manifest(folder).names("model"), weights)


def _read_object(path: Path) -> dict[str, Any]:
    value = read_json(path)
    if not isinstance(value, dict):
        raise RunError(f"{path}: holds no values by name; the checkpoint is damaged")
    return value
