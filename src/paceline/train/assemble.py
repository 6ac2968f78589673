"""From a RunConfig to the parts of a run, in order; each line's place has a reason.

What the machine cannot do is settled here, once, and said: the resolved config is what the run really does.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.core.probe import bf16_products, choose_attention, choose_device
from paceline.data.batches import Corpus, open_corpus
from paceline.data.builtin import builtin_corpus
from paceline.data.config import BUILTIN
from paceline.data.order import check_one_pass
from paceline.data.tokenizer import Tokenizer, load_tokenizer
from paceline.model.attention import plan_reference
from paceline.model.gpt import GPT
from paceline.optim.optimizer import Optimizer
from paceline.train.config import RunConfig

Forward = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(tokens, targets, window) -> loss of every token."""


@dataclass(frozen=True)
class Machine:
    """What the run runs on, and what it had to do without."""

    device: torch.device
    attention: str
    bf16: bool
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Parts:
    """Everything a run consists of besides its folder and its clocks."""

    config: RunConfig
    machine: Machine
    tokenizer: Tokenizer
    train: Corpus
    val: Corpus
    model: GPT
    forward: Forward
    optimizer: Optimizer


def inspect_machine(config: RunConfig) -> tuple[RunConfig, Machine]:
    """The config as this machine can carry it out, and the machine. Nothing is allocated."""
    device = choose_device(config.train.device)
    attention = choose_attention(config.attention.backend, device.name)
    bf16, notes = True, [f"device {device.name}: {device.reason}", f"attention {attention.name}: {attention.reason}"]
    if "bf16" in (config.model.precision.compute, config.optim.muon.ns_dtype):
        verdict = bf16_products(device.name)
        bf16 = verdict.usable
        if not bf16:
            notes.append(f"products in fp32 instead of bf16: {verdict.reason}")
            precision = replace(config.model.precision, compute="fp32")
            config = replace(config, model=replace(config.model, precision=precision))
    return config, Machine(torch.device(device.name), attention.name, bf16, tuple(notes))


def assemble(config: RunConfig, machine: Machine) -> Parts:
    tokenizer, train, val = open_data(config)  # first: a mistake in the data should not wait for the model
    set_global_switches(config)  # before the first allocation, which fixes the allocator's settings
    model = GPT(config.model, end_of_text=config.data.end_of_text, seed=config.seed, plan=plan_reference)
    model.to(machine.device)  # before the optimizer, whose slots follow the parameters
    optimizer = Optimizer(
        model.parameter_classes(),
        config.optim,
        parts=model.fused_parts(),
        bf16_products=machine.bf16,
        compiled=config.train.compile,
    )
    forward = torch.compile(model, fullgraph=True, dynamic=False) if config.train.compile else model
    return Parts(config, machine, tokenizer, train, val, model, forward, optimizer)


def open_data(config: RunConfig) -> tuple[Tokenizer, Corpus, Corpus]:
    """Tokenizer, training and validation shards, checked against the vocabulary."""
    where, vocabulary = config.data.dir, config.model.vocab_size
    if where == BUILTIN:
        where = str(builtin_corpus(config.data.tokenizer))
    tokenizer = load_tokenizer(where, config.data.tokenizer)
    train = open_corpus(where, config.data.train, vocabulary)
    val = open_corpus(where, config.data.val, vocabulary)
    if config.data.one_pass:
        check_one_pass(train, config.batch, config.steps)
    return tokenizer, train, val


def set_global_switches(config: RunConfig) -> None:
    """Process-wide settings of torch; called once per run, never at import."""
    if config.train.threads is not None:
        torch.set_num_threads(config.train.threads)
    torch.use_deterministic_algorithms(config.train.deterministic)
