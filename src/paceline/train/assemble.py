"""From a RunConfig to the parts of a run, in order; each line's place has a reason."""

from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from paceline.backends.registry import OPERATIONS
from paceline.core.errors import PacelineError
from paceline.core.probe import Choice
from paceline.data.batches import Cursor, check_data, spans_at, training_source
from paceline.kernels.embedding import look_up_sorted
from paceline.kernels.row_gradients import RowGradients
from paceline.model.gpt import GPT, Seams, run_plainly, run_recomputed
from paceline.optim.optimizer import Optimizer, newton_schulz
from paceline.optim.rule import RuleContext
from paceline.parallel.batch_split import RankSlice, rank_batch, rank_slice
from paceline.parallel.embedding_sync import EmbeddingSync
from paceline.parallel.machine import Machine, checked_groups, set_torch_switches
from paceline.parallel.memory_fit import Fit, Limits, fit_memory
from paceline.parallel.memory_plans import Planned
from paceline.parallel.ranks import SINGLE_PROCESS, Ranks
from paceline.settings.data import BatchConfig
from paceline.settings.groups import ParamGroup, rules
from paceline.settings.run import RunConfig
from paceline.settings.schedule import batches_of, fewest_candidates, largest_batch, sequences_from
from paceline.settings.spec import describe
from paceline.text.dataset import Dataset, open_dataset
from paceline.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from paceline.parallel.fsdp import FsdpSync


@dataclass(frozen=True)
class Assembly:
    """What a run consists of besides its folder and its clocks."""

    config: RunConfig
    machine: Machine
    data: Dataset
    tokenizer: Tokenizer | None  # None: not available here, so no text and no bits per byte
    model: GPT
    forward: nn.Module
    """(tokens, targets, windows) -> `Losses`, without other ranks, unless `ParallelConfig.collective_forward`."""
    optimizer: Optimizer
    ranks: Ranks
    sync: "EmbeddingSync | FsdpSync"  # the parameters whose gradients ranks add up apart from the rest
    micro_tokens: int | None = None  # of the largest micro-batch; None: as the config says
    row_gradients: dict[str, RowGradients] = field(default_factory=dict)

    def share(self, sequences: int) -> BatchConfig:
        """What this rank computes of a batch of so many sequences, and in which micro-batches."""
        batch, length = self.config.batch, self.config.batch.sequence_tokens
        whole = BatchConfig(tokens=sequences * length, sequence_tokens=length)
        share = rank_batch(whole, self.ranks.world, self.config.parallel.context_parallel)
        most = self.micro_tokens // length if self.micro_tokens else batch.micro_sequences
        micro = next(n for n in range(min(most, share.sequences), 0, -1) if share.sequences % n == 0)
        return replace(share, micro_tokens=micro * share.sequence_tokens)

    @property
    def place(self) -> RankSlice:
        """Which sequences of a batch this rank takes, and which slice of each."""
        return rank_slice(self.ranks.rank, self.ranks.world, self.config.parallel.context_parallel)

    @property
    def largest_share(self) -> BatchConfig:
        return self.share(max(batch.sequences for batch in batches_of(self.config)))


def assemble_to_fit(
    config: RunConfig, machine: Machine, ranks: Ranks = SINGLE_PROCESS, *, before: Any = None
) -> tuple[Assembly, Fit]:
    """`before`: the plan of the run that is resumed, as its card has it."""

    def trial() -> ModuleType:  # on a GPU alone
        from paceline.train import memory_trial

        return memory_trial

    limits = Limits(device=machine.device, limit_gib=config.train.memory_limit_gib, ranks=ranks)
    planned = Planned(config=config, backends=machine.backends, world=ranks.world)
    return fit_memory(planned, limits, lambda fit: _assembled(config, machine, ranks, fit), trial, before)


def _assembled(config: RunConfig, machine: Machine, ranks: Ranks, fit: Fit) -> Assembly:
    plan, head = fit.plan, machine.backends.lm_head
    if head.name != plan.lm_head:
        head = Choice(name=plan.lm_head, reason="the logits of all tokens would not fit")
    segments = config.train.expandable_segments or plan.recompute  # no holes where memory is short
    config = replace(
        config,
        batch=replace(largest_batch(config), micro_tokens=plan.micro_tokens).with_tokens(config.batch.tokens),
        lm_head=replace(config.lm_head, chunk_tokens=plan.lm_head_chunk_tokens),
        train=replace(config.train, recompute=plan.recompute, expandable_segments=segments),
    )
    machine = replace(machine, backends=replace(machine.backends, lm_head=head), notes=(*machine.notes, str(fit)))
    return assemble(config, machine, ranks, micro_tokens=plan.micro_tokens)


def assemble(
    config: RunConfig, machine: Machine, ranks: Ranks = SINGLE_PROCESS, *, micro_tokens: int | None = None
) -> Assembly:
    """With several ranks, called between them (`parallel.rendezvous.joined`)."""
    groups = checked_groups(config, ranks)
    data = open_dataset(config.data, config.model.vocab_size)
    if warning := check_data(data.train, config.data, config.batch, sequences_from(config, 0), config.steps):
        machine = replace(machine, notes=(*machine.notes, warning), lacks=(*machine.lacks, warning))
    if config.model.candidates is not None:
        _check_candidates(data, config)
    tokenizer, machine = _tokenizer(data, machine)
    set_torch_switches(config.train)  # before the first allocation, which fixes the allocator's settings
    request = replace(machine.request, lm_head_chunk_tokens=config.lm_head.chunk_tokens)
    built = {operation: machine.backends.build(operation, request) for operation in OPERATIONS}
    place = rank_slice(ranks.rank, ranks.world, config.parallel.context_parallel)
    if place.parts > 1:
        from paceline.parallel.context_parallel import context_parallel_plan

        built["attention"] = context_parallel_plan(built["attention"], place, ranks, config.parallel)
    model = GPT(
        config.model,
        end_of_text=config.data.end_of_text,
        seed=config.seed,
        seams=Seams(
            plan=built["attention"],
            attention=built["qkv"],
            mlp=built["mlp"],
            lm_head=built["lm_head"],
            matmul=built["matmul"],
            look_up=look_up_sorted if config.train.deterministic and machine.device.type == "cuda" else F.embedding,
            run_block=run_recomputed if config.train.recompute else run_plainly,
        ),
        first_position=place.part * config.batch.sequence_tokens // place.parts,
    )
    rows = _row_gradients(model, config, groups, ranks)
    sync = _on_device(model, config, machine, ranks, rows)  # before the optimizer, whose slots follow the parameters
    context = RuleContext(
        orthogonalise=newton_schulz(config.optim.muon, built["orthogonalise"], bf16_products=machine.bf16),
        muon=config.optim.muon,
        parts={spec.name: spec.parts for spec in describe(config.model).parameters if spec.parts},
        share_work=sync.share_work(),
        update_rows=built["row_update"],
        sync=sync,
    )
    params, clip_norm = model.parameter_groups(), config.optim.clip_norm
    optimizer = Optimizer(params, groups, context, clip_norm=clip_norm, row_gradients=rows)
    if ranks.world > 1 and not sync.forward_is_collective:
        from paceline.parallel.gradients import leave_out_unreached

        leave_out_unreached(model, config.batch.sequence_tokens)  # before code is compiled for them
    return Assembly(
        config, machine, data, tokenizer, model, _compiled(model, config), optimizer, ranks, sync, micro_tokens, rows
    )


def _check_candidates(data: Dataset, config: RunConfig) -> None:
    """By the first sequences; later ones are looked at when their turn comes."""
    from paceline.model.sampled import check_candidates

    corpus, c = data.train, config
    spans = spans_at(corpus, c.data, c.batch, Cursor(), min(8, c.batch.sequences), seed=c.seed)
    targets = training_source(corpus, c.data).take(spans, c.batch.sequence_tokens).targets
    check_candidates(targets, fewest_candidates(c))


def _compiled(model: GPT, config: RunConfig) -> nn.Module:
    if not config.train.compile:
        return model
    torch._dynamo.reset()  # it keeps eight versions of a function, those of this process's earlier runs included
    if config.model.candidates is not None and not config.parallel.fsdp:  # the head apart: one code for all numbers
        from paceline.model.sampled import HeadApart

        return HeadApart(model, torch.compile(model.head_input, fullgraph=True, dynamic=False))
    if not config.parallel.fsdp:
        return cast(nn.Module, torch.compile(model, fullgraph=True, dynamic=False))
    for block in model.blocks:  # one by one: a graph cannot hold the hooks between them
        block.compile(fullgraph=True, dynamic=False)
    return model


def _row_gradients(
    model: GPT, config: RunConfig, groups: dict[str, ParamGroup], ranks: Ranks
) -> dict[str, RowGradients]:
    """Room for the gradients of the tables whose rule takes rows, by parameter."""
    most = max(rank_batch(b, ranks.world, config.parallel.context_parallel).tokens for b in batches_of(config))
    named, found = dict(model.named_parameters()), dict[str, RowGradients]()
    for spec in describe(config.model).parameters:
        if rules()[groups[spec.group].rule].gradient == "rows":
            found[spec.name] = RowGradients(most, spec.shape[1], named[spec.name].dtype)
            model.keep_row_gradients(spec.name, found[spec.name])
    return found


def _on_device(
    model: GPT, config: RunConfig, machine: Machine, ranks: Ranks, rows: dict[str, RowGradients]
) -> "EmbeddingSync | FsdpSync":
    """The model on its device, whole or by this rank's rows, and what of it ranks exchange apart from the rest."""
    if config.parallel.fsdp and ranks.world > 1:
        from paceline.parallel.fsdp import FsdpSync, apply_fsdp  # here: it takes 0.7 s, for which others need not wait

        whole = {name for name, _ in model.named_parameters() if name in rows}
        apply_fsdp(model, machine.device, whole)
        return FsdpSync(model, ranks, whole)
    model.to(machine.device)
    groups = model.parameter_groups()
    tables = [named for group, named in groups.items() if group in describe(config.model).tables]
    apart = [param for named in tables for name, param in named.items() if name not in rows]
    return EmbeddingSync(apart, ranks, sharded=config.parallel.zero1)


def _tokenizer(data: Dataset, machine: Machine) -> tuple[Tokenizer | None, Machine]:
    """One that is not available costs the text and the bits per byte, not the run."""
    try:
        return data.tokenizer(), machine
    except PacelineError as error:
        note = f"no sample and no bits per byte: {error}"
        return None, replace(machine, notes=(*machine.notes, note), lacks=(*machine.lacks, note))
