"""From a RunConfig to the parts of a run, in order; each line's place has a reason.

What the machine cannot do is settled here, once, and said: the resolved config is what the run really does.
"""

import copy
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.core.errors import ConfigError, PacelineError
from paceline.core.probe import Choice, choose_device, choose_products, compiler
from paceline.core.units import BLOCK_TOKENS
from paceline.data.batches import check_one_pass, told_of_passes
from paceline.data.dataset import Dataset, open_dataset
from paceline.data.tokenizer import Tokenizer
from paceline.kernels.embedding import look_up_sorted
from paceline.model.attention import attend_from_named, plan_named, plan_reference
from paceline.model.block import feed_forward_named
from paceline.model.gpt import GPT, run_plainly
from paceline.model.loss import head_loss, head_loss_named
from paceline.optim.optimizer import Optimizer
from paceline.parallel.gradients import leave_out_unreached
from paceline.parallel.ranks import ALONE, Ranks
from paceline.parallel.sequence import split_plan
from paceline.parallel.share import place_of, share_of_batch
from paceline.parallel.tables import SharedTables
from paceline.train.back_ends import BackEnds, choose_back_ends
from paceline.train.config import RunConfig
from paceline.train.ladder import Fit
from paceline.train.recompute import run_recomputed

if TYPE_CHECKING:
    from paceline.parallel.shards import Shards


@dataclass(frozen=True)
class Machine:
    """What the run runs on, and what it had to do without."""

    device: torch.device
    back_ends: BackEnds
    bf16: bool
    notes: tuple[str, ...]
    lacks: tuple[str, ...] = ()
    """Those of the notes that say what a person would wish to change; they are shown when a run starts."""


@dataclass(frozen=True)
class Parts:
    """Everything a run consists of besides its folder and its clocks."""

    config: RunConfig
    machine: Machine
    data: Dataset
    tokenizer: Tokenizer | None
    """None: not to be had here, so no text and no bits per byte."""
    model: GPT
    forward: nn.Module
    """The model, compiled if asked for: (tokens, targets, window) -> losses or total. No other rank is involved, unless
    ranks talk inside a pass (`ParallelConfig.talks_inside`)."""
    optimizer: Optimizer
    ranks: Ranks
    tables: "SharedTables | Shards"
    """The embeddings and the head, which ranks exchange apart from the rest; or all of a model that is sharded."""
    fit: Fit | None = None
    """How a step is cut to fit into memory; None: as the config says, nobody asked."""


def inspect_machine(config: RunConfig, ranks: Ranks = ALONE) -> tuple[RunConfig, Machine]:
    """The config as this machine can carry it out, and the machine. Nothing is allocated."""
    share = share_of_batch(config.batch, ranks.world, config.parallel.split_sequence)
    device = choose_device(config.train.device)
    own_device = _device_of_rank(device, ranks)  # before the probes, which ask the current GPU
    lacks = []
    if config.train.compile and not (verdict := compiler(device.name)).usable:
        lacks.append(f"not compiled, hence slower: {verdict.reason}")
        config = replace(config, train=replace(config.train, compile=False))
    if config.train.compile and ranks.world > 1 and (flag := config.parallel.talks_inside):
        lacks.append(f"not compiled, hence slower: under {flag} ranks talk inside a pass, which one graph cannot hold")
        config = replace(config, train=replace(config.train, compile=False))
    if config.train.memory_limit_gib is not None and config.batch.micro_tokens is not None:
        effect = "only a cap" if device.name == "cuda" else "of no effect on a CPU"
        lacks.append(
            f"--train.memory-limit-gib {config.train.memory_limit_gib:g} is {effect}: --batch.micro-tokens "
            f"{config.batch.micro_tokens:,} says how a step is cut"
        )
    wanted = config.model.precision.compute
    products = choose_products(wanted, device.name)
    back_ends = choose_back_ends(config, device.name, products.name)
    notes = [f"{what} {choice.name}: {choice.reason}" for what, choice in {"device": device, **vars(back_ends)}.items()]
    if ranks.world > 1:
        slices = "" if (parts := config.parallel.split_sequence) == 1 else f", 1/{parts} of each of its sequences"
        notes.append(f"{ranks.world} ranks: each takes {share.tokens:,} tokens of a step{slices}")
    if products.name != wanted:
        note = f"products in {products.name} instead of {wanted}: {products.reason}"
        (lacks if device.name == "cuda" else notes).append(note)  # on a CPU that is the rule
        config = replace(config, model=replace(config.model, precision=config.model.precision.computing_in("fp32")))
    bf16 = choose_products("bf16", device.name).name == "bf16"
    return config, Machine(own_device, back_ends, bf16, (*notes, *lacks), tuple(lacks))


def _device_of_rank(chosen: Choice, ranks: Ranks) -> torch.device:
    """A GPU of its own for each rank, made current: streams and waits without a name mean it. A CPU is shared."""
    if chosen.name != "cuda" or ranks.world == 1:
        return torch.device(chosen.name)
    if ranks.local_rank >= (found := torch.cuda.device_count()):
        raise ConfigError(
            f"rank {ranks.rank} finds no GPU of its own: this machine has {found}; use --nproc-per-node {found}, or "
            f"--train.device cpu"
        )
    torch.cuda.set_device(ranks.local_rank)
    return torch.device("cuda", ranks.local_rank)


def assemble(config: RunConfig, machine: Machine, ranks: Ranks = ALONE) -> Parts:
    """With several ranks, called between them (`parallel.meeting.joined`)."""
    data = open_dataset(config.data, config.model.vocab_size)  # first: a mistake here should not wait for the model
    if config.data.one_pass:
        check_one_pass(data.train, config.data, config.batch, config.steps)
    if told := told_of_passes(data.train, config.data, config.batch, config.steps):
        machine = replace(machine, notes=(*machine.notes, told), lacks=(*machine.lacks, told))
    tokenizer, machine = _tokenizer(data, machine)
    set_global_switches(config)  # before the first allocation, which fixes the allocator's settings
    place = place_of(ranks.rank, ranks.world, config.parallel.split_sequence)
    plan = plan_named(machine.back_ends.attention.name)
    model = GPT(
        config.model,
        end_of_text=config.data.end_of_text,
        seed=config.seed,
        plan=plan if place.parts == 1 else split_plan(plan, place, ranks, config.parallel),
        loss=head_loss_named(machine.back_ends.head.name, config.head.chunk_tokens),
        attend_from=attend_from_named(machine.back_ends.heads.name),
        feed_forward=feed_forward_named(machine.back_ends.mlp.name),
        look_up=look_up_sorted if config.train.deterministic and machine.device.type == "cuda" else F.embedding,
        run_block=run_recomputed if config.train.recompute else run_plainly,
        first_position=place.part * config.batch.sequence_tokens // place.parts,
    )
    tables = _on_device(model, config, machine, ranks)  # before the optimizer, whose slots follow the parameters
    optimizer = Optimizer(
        model.parameter_classes(),
        config.optim,
        parts=model.fused_parts(),
        bf16_products=machine.bf16,
        compiled=config.train.compile,
        fused=machine.back_ends.muon.name == "fused",
        share_work=tables.share_work(),
        tables=tables,
    )
    if ranks.world > 1 and not tables.passes_together:
        leave_out_unreached(model.parameters(), _trial_loss(model, config))  # before code is compiled for them
    forward: nn.Module = model
    if config.train.compile:
        forward = cast(nn.Module, torch.compile(model, fullgraph=True, dynamic=False))
    return Parts(config, machine, data, tokenizer, model, forward, optimizer, ranks, tables)


def _on_device(model: GPT, config: RunConfig, machine: Machine, ranks: Ranks) -> "SharedTables | Shards":
    """The model on its device, whole or by this rank's rows, and what of it ranks exchange apart from the rest."""
    if config.parallel.fully_shard and ranks.world > 1:
        from paceline.parallel.shards import Shards, shard_  # here: it takes 0.7 s, for which others need not wait

        shard_(model, machine.device)
        return Shards(model, ranks)
    model.to(machine.device)
    classes = model.parameter_classes()
    large = [*classes["embeddings"].values(), *classes["head"].values()]
    return SharedTables(large, ranks, sharded=config.parallel.shard_adam)


def _trial_loss(model: GPT, config: RunConfig) -> Tensor:
    """The loss of one short sequence, attention and head by their plain paths, which need not be compiled."""
    plain = copy.copy(model)  # the same weights under other seams
    plain.plan, plain.loss = plan_reference, head_loss
    length = min(BLOCK_TOKENS, config.batch.sequence_tokens)
    tokens = torch.zeros(1, length, dtype=torch.int32, device=model.rotary_cos.device)
    losses: Tensor = plain(tokens, tokens.long(), torch.full_like(tokens[0, 0], length))
    return losses.sum()


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
        from torch._dynamo import config as dynamo  # here: it takes 1.2 s, for which other runs need not wait
        from torch._inductor import config as inductor

        inductor.coordinate_descent_tuning = train.coordinate_descent and not train.deterministic
        if hasattr(inductor, "deterministic"):  # not in every torch: choose no kernel by timing, if the bits show it
            inductor.deterministic = train.deterministic
        dynamo.optimize_ddp = False  # one graph: see parallel/gradients.py
    if train.expandable_segments and torch.cuda.is_available():
        older = torch.cuda.memory._set_allocator_settings  # deprecated where the other is there
        getattr(torch._C, "_accelerator_setAllocatorSettings", older)("expandable_segments:True")
    if train.memory_limit_gib is not None and torch.cuda.is_available():
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, train.memory_limit_gib * 2**30 / total))
