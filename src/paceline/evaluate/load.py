"""A trained run as a model and its tokenizer."""

from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint import store
from paceline.checkpoint.run_config import read_run_config
from paceline.checkpoint.run_folder import RunFolder, open_run, step_of
from paceline.core.errors import RunError
from paceline.core.probe import choose_device, choose_products
from paceline.core.schema import from_dict
from paceline.data.config import BatchConfig, DataConfig
from paceline.data.tokenizer import Tokenizer, load_tokenizer
from paceline.evaluate.config import EvaluateConfig
from paceline.model.config import ModelConfig
from paceline.model.gpt import GPT


@dataclass(frozen=True, kw_only=True)
class Written:
    """What predicting and judging need of a run's config."""

    steps: int
    model: ModelConfig
    data: DataConfig
    batch: BatchConfig
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)


@dataclass(frozen=True)
class LoadedRun:
    model: GPT
    tokenizer: Tokenizer
    window: int
    """Window in tokens at the step of the checkpoint."""
    step: int
    folder: RunFolder
    config: Written

    @property
    def window_tokens(self) -> int | None:
        """The same; None if the model has no window."""
        return None if self.config.model.window.unit == "none" else self.window


@dataclass(frozen=True)
class SavedRun:
    """One checkpoint's weights and what predicting needs beside them, before a model is made of it."""

    folder: RunFolder
    config: Written
    checkpoint: store.Checkpoint

    @property
    def window(self) -> int:
        """Window in tokens at the step of the checkpoint."""
        return self.config.model.window.tokens_at(self.checkpoint.step, self.config.steps)


def load_run(where: str, *, device: str = "auto") -> LoadedRun:
    """The newest good checkpoint of a run, ready to predict."""
    saved = read_saved(where)
    config, chosen = saved.config, choose_device(device).name
    model = GPT(_for_device(config.model, chosen), end_of_text=config.data.end_of_text)
    model.load_state_dict(saved.checkpoint.model)
    tokenizer = load_tokenizer(saved.folder.path, config.data.tokenizer)
    ready = model.to(torch.device(chosen))
    return LoadedRun(ready, tokenizer, saved.window, saved.checkpoint.step, saved.folder, config)


def read_saved(where: str, *, step: int | None = None) -> SavedRun:
    """The newest good checkpoint of a run, or that of a step."""
    run = open_run(where)
    config, _ = read_run_config(run, lambda found: _read(found, at=str(run.config)), may_change=("data.dir",))
    folder = store.newest_good(run)[0] if step is None else _checkpoint_of(run, step)
    return SavedRun(run, config, store.load(folder, groups=("model",)))


def _checkpoint_of(run: RunFolder, step: int) -> Path:
    steps = [step_of(folder) for folder in run.checkpoints()]
    if step not in steps:
        there = f"there are {', '.join(map(str, steps))}" if steps else "none was saved yet"
        raise RunError(f"--checkpoint {step}: {run.path} has no checkpoint of that step; {there}")
    folder = run.checkpoint(step)
    if (reason := store.damage(folder)) is not None:
        raise RunError(f"--checkpoint {step}: {folder} is damaged ({reason}); choose another")
    return folder


def _read(found: Any, *, at: str) -> Written:
    names = [entry.name for entry in fields(Written)]
    known = {name: found[name] for name in names if name in found} if isinstance(found, dict) else found
    return from_dict(Written, known, at=at)


def _for_device(config: ModelConfig, device: str) -> ModelConfig:
    products = choose_products(config.precision.compute, device).name
    return config if products == "bf16" else replace(config, precision=config.precision.computing_in("fp32"))
