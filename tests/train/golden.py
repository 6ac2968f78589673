"""Golden curves: fifty losses of a narrow record, as hex floats, with what their bits depend on.

Written anew, after a change that is meant to change numbers, by `PYTHONPATH=tests python -m train.golden`."""

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from paceline.core.environment import cpu_model
from train.tiny import losses, narrow_record, run

FOLDER = Path(__file__).parent.parent / "golden"
PRESETS = ("r04-muon", "r18-softcap")
"""The first and the last: fused qkv, tied head and autocast here, every later technique there."""
STEPS, THREADS = 50, 1


def machine() -> dict[str, Any]:
    """What the bits of a CPU run depend on besides the code."""
    return {"torch": torch.__version__, "cpu": cpu_model(), "threads": THREADS}


def curve(name: str, folder: Path) -> dict[str, Any]:
    """Train and tell: the preset, its data, its losses."""
    config = narrow_record(name, folder / "data", steps=STEPS)
    done = run(replace(config, train=replace(config.train, threads=THREADS)), folder / "run")
    found = [float(loss).hex() for loss in losses(folder / "run") if loss is not None]
    return {"preset": name, "data": done.card.data_fingerprint, "losses": found}


def main() -> None:
    for name in PRESETS:
        with tempfile.TemporaryDirectory() as folder:
            golden = machine() | curve(name, Path(folder))
        (FOLDER / f"{name}.json").write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main()
