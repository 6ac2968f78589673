"""A trained run as a model and its tokenizer."""

from dataclasses import dataclass, fields, replace

import torch

from paceline.checkpoint import store
from paceline.checkpoint.run_folder import RunFolder, open_run
from paceline.core.probe import choose_device, choose_products
from paceline.core.schema import from_dict
from paceline.data.config import DataConfig
from paceline.data.tokenizer import Tokenizer, load_tokenizer
from paceline.model.config import ModelConfig
from paceline.model.gpt import GPT


@dataclass(frozen=True)
class LoadedRun:
    model: GPT
    tokenizer: Tokenizer
    window: int
    """Window in tokens at the step of the checkpoint."""
    step: int


@dataclass(frozen=True, kw_only=True)
class _Written:
    """What predicting needs of a run's config."""

    steps: int
    model: ModelConfig
    data: DataConfig


def load_run(where: str, *, device: str = "auto") -> LoadedRun:
    """The newest good checkpoint of a run, ready to predict."""
    run = open_run(where)
    config = _read(run)
    folder, _ = store.newest_good(run)
    checkpoint = store.load(folder, optimizer=False)
    chosen = choose_device(device).name
    model_config = _for_device(config.model, chosen)
    model = GPT(model_config, end_of_text=config.data.end_of_text)
    model.load_state_dict(checkpoint.model)
    window = model_config.window.tokens_at(checkpoint.step, config.steps)
    tokenizer = load_tokenizer(run.path, config.data.tokenizer)
    return LoadedRun(model.to(torch.device(chosen)), tokenizer, window, checkpoint.step)


def _read(run: RunFolder) -> _Written:
    found = run.read_config()
    names = [field.name for field in fields(_Written)]
    return from_dict(_Written, {name: found[name] for name in names if name in found}, at=str(run.config))


def _for_device(config: ModelConfig, device: str) -> ModelConfig:
    products = choose_products(config.precision.compute, device).name
    return config if products == "bf16" else replace(config, precision=config.precision.computing_in("fp32"))
