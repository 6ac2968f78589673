"""A trained run as a model and its tokenizer, with the weights that it ships."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from paceline.checkpoint import store
from paceline.checkpoint.run_folder import RunFolder, open_run, step_of
from paceline.checkpoint.verified import read_run_config
from paceline.core.errors import RunError
from paceline.core.probe import choose_device, choose_products
from paceline.model.gpt import GPT
from paceline.model.masks import Windows
from paceline.settings import plugins
from paceline.settings.model import ACTIVATIONS
from paceline.settings.optim import AverageConfig
from paceline.settings.run import MAY_CHANGE_ON_RESUME, RunConfig, read_config
from paceline.settings.schedule import windows_at
from paceline.text.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True)
class LoadedRun:
    model: GPT
    tokenizer: Tokenizer
    windows: Windows
    """At the step of the checkpoint."""
    step: int
    folder: RunFolder
    config: RunConfig


@dataclass(frozen=True)
class SavedRun:
    """One checkpoint's weights and what predicting needs beside them, before a model is made of it."""

    folder: RunFolder
    config: RunConfig
    checkpoint: store.Checkpoint

    @property
    def windows(self) -> Windows:
        """At the step of the checkpoint."""
        return tuple(windows_at(self.config, self.checkpoint.step).values())


def load_run(where: str, *, device: str = "auto") -> LoadedRun:
    """The newest good checkpoint of a run, ready to predict: without the loss terms that it was trained with."""
    saved = read_saved(where)
    _check_activation(saved)
    config, chosen = saved.config, choose_device(device).name
    precision = config.model.precision
    if choose_products(precision.compute, chosen).name != "bf16":
        precision = replace(precision, compute="fp32")
    model_config = replace(config.model, loss_terms=(), precision=precision)
    model = GPT(model_config, end_of_text=config.data.end_of_text)
    store.check_fits("buffers", saved.checkpoint.groups.get("buffers", {}), model.state_buffers())
    model.load_state_dict({**saved.checkpoint.model, **saved.checkpoint.groups.get("buffers", {})})
    tokenizer = _as_large_as(model_config.vocab_size, load_tokenizer(saved.folder.path, config.data.tokenizer))
    ready = model.to(torch.device(chosen))
    return LoadedRun(ready, tokenizer, saved.windows, saved.checkpoint.step, saved.folder, config)


def _as_large_as(vocab_size: int, tokenizer: Tokenizer) -> Tokenizer:
    """One of a text too small for all its merges has fewer tokens than the model; the others stand for nothing."""
    if tokenizer.vocab_size > vocab_size:
        size = f"has {tokenizer.vocab_size:,} tokens, the model {vocab_size:,}"
        raise RunError(f"the run's tokenizer {tokenizer.name} {size}; put that back with which it was trained")
    _ = tokenizer.fingerprint  # of the tokens that it came with
    tokenizer.token_bytes += [b""] * (vocab_size - tokenizer.vocab_size)
    return tokenizer


def read_saved(where: str, *, step: int | None = None) -> SavedRun:
    """The newest good checkpoint of a run, or that of a step."""
    run = open_run(where)
    parse = functools.partial(read_config, at=str(run.config))
    config, _ = read_run_config(run, parse, may_change=MAY_CHANGE_ON_RESUME)
    folder = store.newest_good(run)[0] if step is None else _checkpoint_of(run, step)
    store.check_model(folder, config.model)
    return SavedRun(run, config, _shipped(store.load(folder, without=("optimizer", "random")), config))


def _check_activation(saved: SavedRun) -> None:
    """All of a plug-in that predicting needs. By the config's hashes: another version is another function."""
    name, brought = saved.config.model.activation, plugins.tables("activations", saved.config.plugins)
    if name not in ACTIVATIONS and not any(name in table for table in brought):
        had = ", ".join(map(str, saved.config.plugins)) or "one that its config does not name"
        whose = f"{saved.folder.path}: its activation {name!r:.60} is of a plug-in ({had})"
        raise RunError(f"{whose}; name it with --plugin")


def _shipped(saved: store.Checkpoint, config: RunConfig) -> store.Checkpoint:
    """The checkpoint with the weights that its run ships: averaged ones, if it is the last of a run that averages."""
    average = config.optim.average
    if not average.on or saved.step != config.steps or "average" not in saved.groups:
        return saved
    means = saved.groups["average"]
    store.check_fits("average", means, {name: t.float() for name, t in saved.model.items() if name in means})
    weights = {**saved.model, **shipped_weights(saved.model, means, average)}
    return replace(saved, groups={**saved.groups, "model": weights})


def _checkpoint_of(run: RunFolder, step: int) -> Path:
    steps = [step_of(folder) for folder in run.checkpoints()]
    if step not in steps:
        there = f"there are {', '.join(map(str, steps))}" if steps else "none was saved yet"
        raise RunError(f"--checkpoint {step}: {run.path} has no checkpoint of that step; {there}")
    folder = run.checkpoint(step)
    if (reason := store.damage(folder)) is not None:
        raise RunError(f"--checkpoint {step}: {folder} is damaged ({reason}); choose another")
    return folder


def shipped_weights(
    weights: Mapping[str, Tensor], average: Mapping[str, Tensor], config: AverageConfig
) -> dict[str, Tensor]:
    """weights + blend · (average - weights) for every averaged weight, in its own dtype, scaled to the norm that it had
    if `rescale` asks for it. An average that has not begun, all zeros, changes nothing."""
    found = {}
    for name, mean in average.items():
        raw = weights[name].float()
        mixed = raw + config.blend * (mean.to(raw.device) - raw)
        if config.rescale:
            mixed = mixed * (torch.linalg.vector_norm(raw) / torch.linalg.vector_norm(mixed).clamp(min=1e-30))
        begun = mean.any()
        found[name] = torch.where(begun.to(raw.device), mixed, raw).to(weights[name].dtype)
    return found
