"""Golden curves: the losses of every preset, made narrow, as hex floats, with what their bits depend on.

Two runs each. The first has fifty steps of short shuffled sequences. The second has twelve steps of long sequences in
file order, cut into micro-batches, so that windows, documents and the position in the data show in its bits, and it
also keeps the validation losses and a hash of the last weights and optimizer slots.

Written anew, after a change that is meant to change numbers, by `PYTHONPATH=tests python -m train.golden`."""

import hashlib
import json
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint import store
from paceline.checkpoint.run_folder import RunFolder
from paceline.core.environment import cpu_model
from paceline.metrics.metrics_file import read_metrics
from paceline.recipes.presets import PRESETS as ALL_PRESETS
from paceline.settings.data import BatchConfig
from paceline.settings.run import RunConfig
from train.tiny import losses, narrow_record, run

FOLDER = Path(__file__).parent.parent / "golden"
PRESETS = tuple(name for name in ALL_PRESETS if name != "frontier-60")
"""Narrowed as these are, that one would keep its tables of n-grams and its stages' batches; and it is still tuned."""
STEPS, LONG_STEPS, THREADS = 50, 12, 1


def machine() -> dict[str, Any]:
    """What the bits of a CPU run depend on besides the code."""
    return {"torch": torch.__version__, "cpu": cpu_model(), "threads": THREADS}


def curve(name: str, folder: Path) -> dict[str, Any]:
    """Train fifty steps: the preset, its data, its losses."""
    done = run(_on_one_thread(narrow_record(name, folder / "data", steps=STEPS)), folder / "run")
    return {"preset": name, "data": done.card.data_fingerprint, "losses": _hex(losses(folder / "run"))}


def long_curve(name: str, folder: Path) -> dict[str, Any]:
    """Train twelve steps of long sequences: losses, validation losses, and a hash of the last state."""
    config = narrow_record(name, folder / "data", steps=LONG_STEPS)
    config = replace(
        config,
        data=replace(config.data, order="sequential"),
        batch=BatchConfig(tokens=2048, sequence_tokens=512, micro_tokens=1024),
        evaluate=replace(config.evaluate, every=5, tokens=1024),
    )
    run(_on_one_thread(config), folder / "run")
    newest, _ = store.newest_good(RunFolder(folder / "run"))
    saved = store.load(newest)
    validations = [record.val_loss for record in read_metrics(folder / "run")[1]]
    return {
        "losses": _hex(losses(folder / "run")),
        "validations": _hex(validations),
        "weights": digest(saved.model),
        "slots": digest(saved.groups["optimizer"]),
    }


def _on_one_thread(config: RunConfig) -> RunConfig:
    return replace(config, train=replace(config.train, threads=THREADS))


def _hex(values: list[float | None]) -> list[str]:
    return [float(value).hex() for value in values if value is not None]


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Of names and bits, in the order of the names."""
    found = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(tensors.items()):
        found.update(name.encode())
        found.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def main() -> None:
    for name in PRESETS:
        with tempfile.TemporaryDirectory() as short, tempfile.TemporaryDirectory() as long:
            golden = machine() | curve(name, Path(short)) | {"long": long_curve(name, Path(long))}
        (FOLDER / f"{name}.json").write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main()
