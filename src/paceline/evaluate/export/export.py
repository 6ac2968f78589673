"""A run's weights in a folder of their own, which appears when it is complete: for transformers, or plain tensors."""

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

from safetensors.torch import save_file
from torch import Tensor

from paceline.core.errors import PacelineError, RunError, UserError
from paceline.core.files import write_json
from paceline.core.schema import to_dict
from paceline.evaluate.export.architecture import fixed_tensors, generation_config, hf_config, hf_weights
from paceline.evaluate.export.model_card import model_card
from paceline.evaluate.export.stock import stock_config, stock_shape, stock_weights
from paceline.evaluate.export.tokenizer_files import library_tokenizer, tokenizer_config
from paceline.evaluate.load import SavedRun
from paceline.metrics.card import read_card
from paceline.settings.data import is_path
from paceline.settings.model import ACTIVATIONS
from paceline.text.tokenizer import END_OF_TEXTS, FILE_NAME, Tokenizer, carried_identity, load_tokenizer

Target = Literal["hf", "safetensors"]
WEIGHTS = "model.safetensors"
MODEL_FILES = ("configuration_paceline.py", "modeling_paceline.py")
"""Beside this module; what transformers runs where the model is none of its own."""


def export(saved: SavedRun, to: Target, out: Path) -> None:
    """Write the checkpoint to the folder `out`, which must be empty or not there yet."""
    check_free(out)
    with _appearing(out) as folder:
        (_write_hf if to == "hf" else _write_plain)(saved, folder)


def check_free(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        what = "is not empty" if out.is_dir() else "is a file"
        raise UserError(f"--out {out}: {what}; choose a new folder")


def _write_hf(saved: SavedRun, folder: Path) -> None:
    model, end_of_text = saved.config.model, saved.config.data.end_of_text
    if model.activation not in ACTIVATIONS:
        why = f"--model.activation {model.activation} is of a plug-in, whose code an export does not carry"
        raise UserError(f"{saved.folder.path}: {why}; use --to safetensors")
    length = saved.config.batch.sequence_tokens
    tokenizer, card = _tokenizer_of(saved), read_card(saved.folder.path)
    write_json(folder / "tokenizer.json", library_tokenizer(tokenizer))
    write_json(folder / "tokenizer_config.json", tokenizer_config(length, tokenizer.end_of_text_word))
    weights, shape = saved.checkpoint.model, stock_shape(model)
    if shape is None:
        config = hf_config(model, sequence_tokens=length, windows=saved.windows, end_of_text=end_of_text)
        tensors = hf_weights(model, weights) | fixed_tensors(model)
        for name in MODEL_FILES:
            shutil.copyfile(Path(__file__).with_name(name), folder / name)
    else:
        config = stock_config(model, shape, sequence_tokens=length, end_of_text=end_of_text)
        tensors = stock_weights(model, shape, weights)
    write_json(folder / "config.json", {**config, "prefix": tokenizer.end_of_text_word})
    write_json(folder / "generation_config.json", generation_config(model, end_of_text=end_of_text))
    readme = model_card(card, step=saved.checkpoint.step, own_code=shape is None)
    (folder / "README.md").write_text(readme, encoding="utf-8")
    _write_weights(folder, tensors)


def _write_plain(saved: SavedRun, folder: Path) -> None:
    """Weights under our own names, and what they mean: `ModelConfig` by field."""
    carried, config = carried_identity(saved.folder.path), saved.config
    facts = {
        "step": saved.checkpoint.step,
        "window_tokens": list(saved.windows),
        "end_of_text": config.data.end_of_text,
        "tokenizer": config.data.tokenizer,
        "tokenizer_fingerprint": None if carried is None else carried.fingerprint,
        "model": to_dict(config.model),
    }
    write_json(folder / "architecture.json", facts)
    _write_weights(folder, saved.checkpoint.model)


def _write_weights(folder: Path, weights: Mapping[str, Tensor]) -> None:
    path = folder / WEIGHTS
    save_file(dict(weights), path, metadata={"format": "pt"})  # transformers asks for that entry
    path.chmod(folder.stat().st_mode & 0o666)  # the library makes files that only their owner can read


def _tokenizer_of(saved: SavedRun) -> Tokenizer:
    name, folder = saved.config.data.tokenizer, saved.folder.path
    if name not in END_OF_TEXTS and not is_path(name) and not (folder / FILE_NAME).exists():
        raise RunError(f"{folder / FILE_NAME}: does not exist, so {name} is lost; --to safetensors needs no tokenizer")
    return load_tokenizer(folder, name)


@contextlib.contextmanager
def _appearing(out: Path) -> Iterator[Path]:
    """A folder to fill, which becomes `out` when the block ends without an error."""
    out = out.resolve()  # `.` has no name
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        os.replace(temporary, out)
    except OSError as error:
        raise PacelineError(f"--out {out}: could not be written ({error.strerror or error})") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
