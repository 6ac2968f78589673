"""Frozen runs: one per format of checkpoints, stopped after three of six steps, kept as that version wrote them.

Written once, when a format is new, by `PYTHONPATH=tests python -m train.frozen`; never again."""

import json
import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from paceline.checkpoint.manifest import FORMAT
from paceline.checkpoint.run_folder import RunFolder
from paceline.metrics.card import read_card, write_card
from paceline.settings.run import RunConfig
from paceline.train.run import resume_run
from train.tiny import losses, run, tiny_config

FOLDER = Path(__file__).parent.parent / "frozen"
DATA = Path("data")
"""Beside the run, so that no path of a machine is frozen with it."""


def config() -> RunConfig:
    found = tiny_config(DATA, steps=6)
    model = replace(found.model, width=8, num_heads=1, head_dim=8)
    rare = replace(found.checkpoint, every=None)
    return replace(found, model=model, train=replace(found.train, threads=1, stop_after=3), checkpoint=rare)


def main() -> None:
    out = FOLDER / f"format-{FORMAT}"
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        stopped = config()
        run(stopped, Path("run"))
        write_card(Path("run"), replace(read_card(Path("run")), environment={}))
        shutil.copytree("run", out)
        resume_run(replace(stopped, train=replace(stopped.train, stop_after=None)), RunFolder(Path("run")))
        expected = [float(loss).hex() for loss in losses(Path("run")) if loss is not None]
    (out / "expected.json").write_text(json.dumps(expected) + "\n")


if __name__ == "__main__":
    main()
