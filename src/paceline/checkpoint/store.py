"""Checkpoints: written to a temporary folder, hashed, flushed, renamed, then the oldest are pruned.

A checkpoint is `model.safetensors`, `optimizer.safetensors`, `state.json` and `manifest.json` with a blake2b hash per
file. safetensors loads a file with a flipped bit without complaint, so loading checks the hashes first and falls back
to the checkpoint before. Nothing is ever unpickled.
"""

import contextlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from paceline.checkpoint.run_folder import RunFolder, step_of
from paceline.core.errors import ConfigError, PacelineError, RunError
from paceline.core.files import blake2b_of, sync_folder, write_json
from paceline.core.schema import read_json

FORMAT = 1
FILES = ("model.safetensors", "optimizer.safetensors", "state.json")


@dataclass(frozen=True)
class Checkpoint:
    step: int
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    state: dict[str, Any]
    """JSON values: data cursor, metrics position, clocks."""


def save(run: RunFolder, checkpoint: Checkpoint, *, keep: int) -> Path:
    """Publish a checkpoint and prune all but the newest `keep`. A failure leaves the earlier ones as they were."""
    final = run.checkpoint(checkpoint.step)
    temporary = final.with_name(f".{final.name}.{os.getpid()}.tmp")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        _write(temporary, checkpoint)
        if final.exists():
            shutil.rmtree(final)
        os.rename(temporary, final)
        sync_folder(final.parent)
    except Exception as error:
        with contextlib.suppress(OSError):
            shutil.rmtree(temporary)
        raise PacelineError(f"{final}: could not be saved ({error}); the checkpoint before it is intact") from error
    for old in run.checkpoints()[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def _write(folder: Path, checkpoint: Checkpoint) -> None:
    from safetensors.torch import save_file

    save_file(_plain(checkpoint.model), folder / "model.safetensors")
    save_file(_plain(checkpoint.optimizer), folder / "optimizer.safetensors")
    write_json(folder / "state.json", checkpoint.state)
    for name in FILES[:2]:
        with open(folder / name, "rb") as file:
            os.fsync(file.fileno())
    hashes = {name: blake2b_of(folder / name) for name in FILES}
    write_json(folder / "manifest.json", {"format": FORMAT, "step": checkpoint.step, "blake2b": hashes})


def _plain(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint, naming the file, or None."""
    try:
        manifest = read_json(folder / "manifest.json")
        if manifest["format"] != FORMAT:
            return f"manifest.json: format {manifest['format']}, this version reads {FORMAT}"
        hashes = manifest["blake2b"]
        return next((f"{n}: does not match its hash" for n in FILES if blake2b_of(folder / n) != hashes[n]), None)
    except ConfigError as error:
        return str(error)
    except OSError as error:
        return f"{Path(str(error.filename)).name}: {error.strerror}"
    except (KeyError, TypeError) as error:
        return f"manifest.json: lacks {error}"


def newest_good(run: RunFolder) -> tuple[Path, list[str]]:
    """The newest checkpoint whose hashes hold, and why newer ones were passed over."""
    passed_over: list[str] = []
    for folder in reversed(run.checkpoints()):
        if (reason := damage(folder)) is None:
            return folder, passed_over
        passed_over.append(f"{folder.name}: {reason}")
    detail = "; ".join(passed_over) or "none was saved yet"
    raise RunError(f"{run.path}: no usable checkpoint ({detail}); let the run reach one, or train again")


def load(folder: Path, *, optimizer: bool = True) -> Checkpoint:
    """Read a checkpoint that `newest_good` has verified."""
    from safetensors.torch import load_file

    return Checkpoint(
        step=step_of(folder),
        model=load_file(folder / "model.safetensors"),
        optimizer=load_file(folder / "optimizer.safetensors") if optimizer else {},
        state=read_json(folder / "state.json"),
    )
