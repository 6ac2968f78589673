"""From a RunConfig to the parts of a run, in order; each line's place has a reason.

What the machine cannot do is settled here, once, and said: the resolved config is what the run really does.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch._inductor.config
from torch import Tensor

from paceline.core.errors import PacelineError
from paceline.core.probe import choose_attention, choose_device, choose_head, choose_products
from paceline.data.batches import check_one_pass
from paceline.data.dataset import Dataset, open_dataset
from paceline.data.tokenizer import Tokenizer
from paceline.model.attention import PLANS
from paceline.model.gpt import GPT, run_plainly
from paceline.model.loss import HEAD_LOSSES
from paceline.optim.optimizer import Optimizer
from paceline.train.config import RunConfig
from paceline.train.recompute import run_recomputed

Forward = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(tokens, targets, window) -> loss of every token."""


@dataclass(frozen=True)
class Machine:
    """What the run runs on, and what it had to do without."""

    device: torch.device
    attention: str
    head: str
    bf16: bool
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Parts:
    """Everything a run consists of besides its folder and its clocks."""

    config: RunConfig
    machine: Machine
    data: Dataset
    tokenizer: Tokenizer | None
    """None: not to be had here, so no text and no bits per byte."""
    model: GPT
    forward: Forward
    optimizer: Optimizer


def inspect_machine(config: RunConfig) -> tuple[RunConfig, Machine]:
    """The config as this machine can carry it out, and the machine. Nothing is allocated."""
    device = choose_device(config.train.device)
    attention = choose_attention(config.attention.backend, device.name, compiled=config.train.compile)
    wanted = config.model.precision.compute
    products = choose_products(wanted, device.name)
    head = choose_head(config.head.backend, compiled=config.train.compile)
    choices = {"device": device, "attention": attention, "head": head}
    notes = [f"{what} {choice.name}: {choice.reason}" for what, choice in choices.items()]
    if products.name != wanted:
        notes.append(f"products in {products.name} instead of {wanted}: {products.reason}")
        config = replace(config, model=replace(config.model, precision=config.model.precision.computing_in("fp32")))
    bf16 = choose_products("bf16", device.name).name == "bf16"
    return config, Machine(torch.device(device.name), attention.name, head.name, bf16, tuple(notes))


def assemble(config: RunConfig, machine: Machine) -> Parts:
    data = open_dataset(config.data, config.model.vocab_size)  # first: a mistake here should not wait for the model
    if config.data.one_pass:
        check_one_pass(data.train, config.data, config.batch, config.steps)
    tokenizer, machine = _tokenizer(data, machine)
    set_global_switches(config)  # before the first allocation, which fixes the allocator's settings
    model = GPT(
        config.model,
        end_of_text=config.data.end_of_text,
        seed=config.seed,
        plan=PLANS[machine.attention],
        loss=HEAD_LOSSES[machine.head],
        run_block=run_recomputed if config.train.recompute else run_plainly,
    )
    model.to(machine.device)  # before the optimizer, whose slots follow the parameters
    optimizer = Optimizer(
        model.parameter_classes(),
        config.optim,
        parts=model.fused_parts(),
        bf16_products=machine.bf16,
        compiled=config.train.compile,
    )
    forward = torch.compile(model, fullgraph=True, dynamic=False) if config.train.compile else model
    return Parts(config, machine, data, tokenizer, model, forward, optimizer)


def _tokenizer(data: Dataset, machine: Machine) -> tuple[Tokenizer | None, Machine]:
    """Training needs only ids, so a tokenizer that cannot be had costs the text and the bits per byte, not the run."""
    try:
        return data.tokenizer(), machine
    except PacelineError as error:
        return None, replace(machine, notes=(*machine.notes, f"no sample and no bits per byte: {error}"))


def set_global_switches(config: RunConfig) -> None:
    """Process-wide settings of torch; called once per run, never at import."""
    train = config.train
    if train.threads is not None:
        torch.set_num_threads(train.threads)
    torch.use_deterministic_algorithms(train.deterministic)
    if train.deterministic:  # cuBLAS reads it at its first product; torch refuses products without it
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if train.compile:
        torch._inductor.config.coordinate_descent_tuning = train.coordinate_descent
    if train.expandable_segments and torch.cuda.is_available():
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")
