"""Loading checkpoints that `newest_good` has verified: of each tensor what the target keeps, all of it or a DTensor's
own rows. Nothing is ever unpickled; safetensors compares what a header claims with the file before it allocates."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from paceline.checkpoint.manifest import CONFIG, STATE
from paceline.checkpoint.save import Checkpoint as Checkpoint
from paceline.checkpoint.tensors import NAMES
from paceline.checkpoint.verified import damage as damage
from paceline.checkpoint.verified import newest_good as newest_good
from paceline.checkpoint.verified import read_manifest
from paceline.core.errors import RunError
from paceline.core.schema import read_json
from paceline.parallel.embedding_sync import put_rows
from paceline.settings.model import DType, ModelConfig
from paceline.settings.spec import describe

DTYPES = {name: dtype for dtype, name in NAMES.items()}
FORMATS: dict[DType, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
Shapes = dict[str, tuple[torch.Size, torch.dtype]]


def load(folder: Path, *, without: Sequence[str] = ()) -> Checkpoint:
    """Read a checkpoint that `newest_good` has verified, tensors to the host: every group but those named."""
    manifest = read_manifest(folder)
    named = {entry.name for entry in manifest.files}
    return Checkpoint(
        step=manifest.step,
        groups={g: read_group(folder, names) for g, names in manifest.groups().items() if g not in without},
        state=_read_object(folder / STATE),
        config=_read_object(folder / CONFIG) if CONFIG in named else None,
    )


def load_weights_into(folder: Path, weights: Mapping[str, Tensor]) -> None:
    """Fill a model's parameters in place, on any device, whole or sharded by rows."""
    read_group_into(folder, read_manifest(folder).groups()["model"], weights)


def check_model(folder: Path, model: ModelConfig) -> None:
    """Raise RunError unless the weights are those of this model, before it is made: of a folder from somebody else a
    config may ask for any size."""
    wanted = {spec.name: (torch.Size(spec.shape), FORMATS[spec.dtype]) for spec in describe(model).parameters}
    _check_shapes(folder, _shapes(_opened(folder, read_manifest(folder).groups()["model"])), wanted)


def _read_object(path: Path) -> dict[str, Any]:
    value = read_json(path)
    if not isinstance(value, dict):
        raise RunError(f"{path}: holds no values by name; the checkpoint is damaged")
    return value


def read_group(folder: Path, names: Sequence[str]) -> dict[str, Tensor]:
    """All tensors of these files, on the host."""
    files = _opened(folder, names)
    _shapes(files)
    return {name: file.get_tensor(name).clone() for name, file in files.items()}  # not a view of the file


def read_group_into(folder: Path, names: Sequence[str], targets: Mapping[str, Tensor]) -> None:
    """Fill tensors in place, on any device, each DTensor with its own rows. Names, shapes and formats must all fit;
    else nothing is changed."""
    files = _opened(folder, names)
    _check_shapes(folder, _shapes(files), {name: (tensor.shape, tensor.dtype) for name, tensor in targets.items()})
    with torch.no_grad():
        for name, target in targets.items():
            put_rows(target.detach(), files[name].get_slice(name))


def check_fits(group: str, saved: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    """Raise RunError unless what a checkpoint has of a group has the names, shapes and formats of a run's own."""
    states: list[Shapes] = [{name: (t.shape, t.dtype) for name, t in tensors.items()} for tensors in (saved, own)]
    if states[0] != states[1]:
        odd = min(name for name in states[0].keys() | states[1].keys() if states[0].get(name) != states[1].get(name))
        raise RunError(f"{group}: {odd} is not what this run keeps; resume with the config that wrote it")


def _check_shapes(folder: Path, saved: Shapes, wanted: Shapes) -> None:
    if strange := sorted(set(saved) ^ set(wanted)):
        place = "is not in the checkpoint" if strange[0] in wanted else "is in the checkpoint only"
        raise RunError(f"{folder}: {strange[0]} {place}; it was written by another model, resume with its config")
    for name, fits in wanted.items():
        if saved[name] != fits:
            needs = f"this run needs {fits[1]} {tuple(fits[0])}; resume with the config that wrote it"
            raise RunError(f"{folder}: {name} is {saved[name][1]} {tuple(saved[name][0])}, but {needs}")


def _opened(folder: Path, names: Sequence[str]) -> dict[str, Any]:
    """Every tensor's name to the open file that holds it."""
    found: dict[str, Any] = {}
    for path in (folder / name for name in names):
        try:
            file: Any = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise RunError(f"{path}: not a safetensors file ({error}); it is damaged") from None
        found |= dict.fromkeys(file.keys(), file)
    return found


def _shapes(files: Mapping[str, Any]) -> Shapes:
    found: Shapes = {}
    for name, file in files.items():
        piece = file.get_slice(name)
        if (dtype := DTYPES.get(piece.get_dtype())) is None:
            raise RunError(f"{name}: a checkpoint holds no numbers of format {piece.get_dtype()}")
        found[name] = torch.Size(piece.get_shape()), dtype
    return found
