"""A trained run as a model and its tokenizer."""

from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from paceline.checkpoint import store
from paceline.checkpoint.run_config import read_run_config
from paceline.checkpoint.run_folder import RunFolder, open_run
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


def load_run(where: str, *, device: str = "auto") -> LoadedRun:
    """The newest good checkpoint of a run, ready to predict."""
    run = open_run(where)
    config, _ = read_run_config(run, lambda found: _read(found, at=str(run.config)), may_change=("data.dir",))
    folder, _ = store.newest_good(run)
    checkpoint = store.load(folder, groups=("model",))
    chosen = choose_device(device).name
    model_config = _for_device(config.model, chosen)
    model = GPT(model_config, end_of_text=config.data.end_of_text)
    model.load_state_dict(checkpoint.model)
    window = model_config.window.tokens_at(checkpoint.step, config.steps)
    tokenizer = load_tokenizer(run.path, config.data.tokenizer)
    return LoadedRun(model.to(torch.device(chosen)), tokenizer, window, checkpoint.step, run, config)


def _read(found: Any, *, at: str) -> Written:
    names = [entry.name for entry in fields(Written)]
    known = {name: found[name] for name in names if name in found} if isinstance(found, dict) else found
    return from_dict(Written, known, at=at)


def _for_device(config: ModelConfig, device: str) -> ModelConfig:
    products = choose_products(config.precision.compute, device).name
    return config if products == "bf16" else replace(config, precision=config.precision.computing_in("fp32"))
