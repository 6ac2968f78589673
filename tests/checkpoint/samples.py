"""A checkpoint small enough to be written thousands of times, and how it is damaged."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from paceline.checkpoint import store
from paceline.checkpoint.run_folder import RunFolder
from paceline.checkpoint.save import Checkpoint, save

FILES = (
    "model-00001.safetensors",
    "optimizer-00001.safetensors",
    "random-00001.safetensors",
    "bad_steps-00001.safetensors",
    "state.json",
    "config.json",
    "manifest.json",
)


def checkpoint(step: int, model: Mapping[str, Tensor] | None = None) -> Checkpoint:
    return Checkpoint(
        step=step,
        groups={
            "model": model or {"a": torch.full((3, 2), float(step)), "b": torch.ones(4, dtype=torch.bfloat16)},
            "optimizer": {"step": torch.tensor(step), "m.a": torch.arange(6.0).view(3, 2)},
            "random": {"0/torch": torch.arange(5, dtype=torch.uint8)},
            "bad_steps": {"state": torch.full((8,), 0.1, dtype=torch.float64)},
        },
        state={"cursor": {"position": 16 * step}},
        config={"steps": 10},
    )


def equal(one: Checkpoint, other: Checkpoint) -> bool:
    """In every bit."""
    if (one.step, one.state, one.config) != (other.step, other.state, other.config):
        return False
    pairs = [(tensors, other.groups.get(group, {})) for group, tensors in one.groups.items()]
    return one.groups.keys() == other.groups.keys() and all(
        a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a) for a, b in pairs
    )


def saved(folder: Path, *steps: int) -> RunFolder:
    run = RunFolder(folder)
    for step in steps:
        save(run, checkpoint(step), keep=max(2, len(steps)))
    return run


def assert_loads(run: RunFolder, step: int) -> None:
    folder, _ = store.newest_good(run)
    assert folder.name == f"step_{step:06d}"
    assert equal(store.load(folder), checkpoint(step))
