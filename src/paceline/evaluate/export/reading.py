"""The weights of an export by our own names again. Nothing is executed.

The functions that write an export are asked what they do to the numbers of the places, and that is undone. Costs 16
bytes a parameter for a moment, of a GPT-2 or Llama for the whole model, of our own architecture a tensor at a time.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from paceline.core.errors import ConfigError, RunError
from paceline.core.schema import from_dict, read_json
from paceline.evaluate.export.architecture import hf_weights
from paceline.evaluate.export.stock import stock_shape, stock_weights
from paceline.evaluate.export.tokenizer_files import library_tokenizer
from paceline.settings.model import ModelConfig
from paceline.settings.spec import Parameter, describe
from paceline.text.tokenizer import FILE_NAME, Tokenizer

ARCHITECTURE_FILE, WEIGHTS = "architecture.json", "model.safetensors"
Tensors = Mapping[str, Tensor]


def is_export(folder: Path) -> bool:
    return (folder / WEIGHTS).is_file()


def read_export(folder: Path, model: ModelConfig) -> dict[str, Tensor]:
    """The tensors of an export as this model names them; a RunError names one that is missing or has another shape."""
    try:
        theirs = load_file(folder / WEIGHTS)
    except (SafetensorError, OSError) as error:
        raise RunError(f"{folder / WEIGHTS}: not a safetensors file ({error}); it is damaged") from None
    if (folder / ARCHITECTURE_FILE).is_file():
        return theirs
    specs, shape = describe(model).parameters, stock_shape(model)
    kind, wanted = _facts(folder / "config.json").get("model_type"), shape or "paceline"
    if kind != wanted:
        raise RunError(f"{folder}: holds a model of type {kind}, but this run's is of type {wanted}; use its settings")
    if shape is not None:
        return _undone(folder, lambda ours: stock_weights(model, shape, ours), specs, theirs)
    each = (_undone(folder, lambda ours: hf_weights(model, ours), [spec], theirs) for spec in specs)
    return {name: tensor for found in each for name, tensor in found.items()}


def _undone(
    folder: Path, export: Callable[[Tensors], dict[str, Tensor]], specs: Sequence[Parameter], theirs: Tensors
) -> dict[str, Tensor]:
    """What `export` has made these of."""
    ends = torch.tensor([spec.numel for spec in specs]).cumsum(0).tolist()
    places = torch.arange(1, ends[-1] + 1, dtype=torch.float64).tensor_split(ends[:-1])  # a sign may be turned
    exported = export({spec.name: part.view(spec.shape) for spec, part in zip(specs, places, strict=True)})
    found = torch.empty(ends[-1])
    for name, place in exported.items():
        if name not in theirs:
            raise RunError(f"{folder}: has no {name}, which this model needs; it is of another model")
        if (shape := theirs[name].shape) != place.shape:
            raise RunError(f"{folder}: {name} is {tuple(shape)} there and {tuple(place.shape)} here; use its settings")
        found[place.abs().long() - 1] = theirs[name].float() * place.sign().float()
    parts = found.tensor_split(ends[:-1])
    return {spec.name: part.view(spec.shape) for spec, part in zip(specs, parts, strict=True)}


def same_tokenizer(folder: Path, tokenizer: Tokenizer | None, name: str) -> bool | None:
    """Whether an export goes with a tokenizer, of this name at least; None: it cannot be told."""
    if (folder / ARCHITECTURE_FILE).is_file():
        facts = _facts(folder / ARCHITECTURE_FILE)
        made_with = facts.get("tokenizer_fingerprint")
        if made_with is not None and tokenizer is not None:
            return bool(made_with == tokenizer.fingerprint)
        return bool(facts.get("tokenizer") == name)
    if tokenizer is None or not (folder / FILE_NAME).is_file():
        return None
    return bool(_model_of(read_json(folder / FILE_NAME)) == _model_of(library_tokenizer(tokenizer)))


def _model_of(saved: Any) -> Any:
    """Vocabulary and merges; how those are written depends on the library's version."""
    model = saved.get("model") if isinstance(saved, dict) else None
    if not isinstance(model, dict) or not isinstance(model.get("merges"), list):
        return None
    merges = [merge.split(" ") if isinstance(merge, str) else list(merge) for merge in model["merges"]]
    return model.get("vocab"), json.dumps(merges)


def exported_model(folder: Path) -> ModelConfig | None:
    """The settings that plain weights were exported with; None: it does not say, or another version wrote it."""
    try:
        return from_dict(ModelConfig, _facts(folder / ARCHITECTURE_FILE).get("model"))
    except ConfigError:
        return None


def _facts(path: Path) -> dict[str, Any]:
    found = read_json(path)
    if not isinstance(found, dict):
        raise RunError(f"{path}: holds no values by name; the export is damaged")
    return found
