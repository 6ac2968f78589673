"""How much memory a step takes on one rank, by formula. No torch.

The peak is the largest of three moments on top of what is always there: at the lm_head, in the backward pass of a block
(under recomputation with its activations), and in the update. Weights and slots come from the model's description and
the rules of its groups, what an operation keeps from its back end (`backends/`). Found: within 2 % of what autograd
keeps, uncompiled, and 0 to 5 % off peaks on an H200, compiled; no peak under FSDP was measured yet. Not included: the
allocator's holes and the driver's own memory, for which the caller leaves a margin, and 1.0 to 1.4 GiB of libraries and
memory not given back of a process on a CPU (record 18 at a quarter: 4.0 GiB resident for 3.1).
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from paceline.backends.registry import FP32, Kept, Operation, find
from paceline.core.units import BLOCK_TOKENS, round_up
from paceline.settings.data import BatchConfig
from paceline.settings.groups import ParamGroup, RuleFacts, param_groups, rules
from paceline.settings.model import ModelConfig
from paceline.settings.optim import OptimConfig
from paceline.settings.run import RunConfig
from paceline.settings.spec import DTYPE_BYTES, describe

KEEPING: tuple[Operation, ...] = ("attention", "qkv", "mlp", "lm_head")  # their back ends decide what a step keeps


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How a micro-batch is carried out: back ends by the names that the settings use."""

    attention: str = "reference"
    qkv: str = "reference"
    mlp: str = "reference"
    lm_head: str = "chunked"
    lm_head_chunk_tokens: int | None = None
    compiled: bool = False
    recompute: bool = False
    gradient_copies: int = 1  # of each gradient: 2 where ranks exchange copies instead of views
    shards: int = 1  # ranks that each keep a share of weights, gradients and slots
    table_shards: int = 1  # ranks that each keep a share of the slots of tables with dense gradients
    halo_tokens: int = 0  # tokens that attention fetches to the left of each sequence, if that is a slice

    @staticmethod
    def of(config: RunConfig, world: int, backends: Mapping[Operation, str]) -> "Execution":
        """As a run is carried out on so many ranks by the back ends of `KEEPING`."""
        parallel = config.parallel
        return Execution(
            **{operation: backends[operation] for operation in KEEPING},
            lm_head_chunk_tokens=config.lm_head.chunk_tokens,
            compiled=config.train.compile and (world == 1 or parallel.context_parallel == 1),
            recompute=config.train.recompute,
            gradient_copies=2 if world > 1 and not parallel.bucket_views else 1,
            shards=world if parallel.fsdp else 1,
            table_shards=world if parallel.zero1 and not parallel.fsdp else 1,
            halo_tokens=halo_tokens(config.model, config.batch, parallel.context_parallel),
        )


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one rank."""

    weights: int  # with the rotary tables and two batches of tokens
    gathered: int  # of other ranks' weights, what is here during forward and backward pass, with its gradients
    slots: int
    gradients: int  # between micro-batches
    gradients_kept: int  # in the update
    activations: int  # kept for the backward pass of one micro-batch, up to the head
    head_kept: int  # the same of head and loss
    head: int  # what exists at the head beyond these
    block: int  # the same in the backward pass of a block: its gradients and, under recomputation, its activations
    update: int  # the same in the optimizer's step
    micro_batches: int
    compiled: bool

    @property
    def always(self) -> int:
        return self.weights + self.slots

    @property
    def peak(self) -> int:
        held = self.gradients if self.micro_batches > 1 else 0  # those of the micro-batches before
        whole = self.compiled and not self.gathered  # under FSDP, blocks are compiled one by one
        fresh = self.gradients if whole else 0  # compiled code hands them over at its end
        at_head = held + self.activations + self.head_kept + self.head
        in_blocks = held + self.activations + self.block
        at_the_end = held + fresh + self.block
        in_passes = self.gathered + max(at_head, in_blocks, at_the_end)
        return self.always + max(in_passes, self.gradients_kept + self.update)


def step_memory(model: ModelConfig, optim: OptimConfig, share: BatchConfig, how: Execution) -> Memory:
    """Of a step of which this rank computes `share`."""
    at = Kept(
        model=model,
        layer=None,
        sequence_tokens=share.sequence_tokens,
        micro_sequences=share.micro_sequences,
        compiled=how.compiled,
        lm_head_chunk_tokens=how.lm_head_chunk_tokens,
    )
    tokens, compute, kept = share.micro_sequences * share.sequence_tokens, at.compute_bytes, _kept_per_token(at, how)
    cast_weights = 0 if compute == FP32 else compute * describe(model).numel("matrices")  # copies in that format
    if how.recompute:
        blocks = float(tokens * model.num_layers * _stream(model))
        waiting = compute * sum(model.value_table_widths.values())  # gradients of rows that two layers use
        block = tokens * (max(each for each, _ in kept) + waiting) + cast_weights / model.num_layers
    else:
        blocks, block = tokens * sum(each * count for each, count in kept) + cast_weights, 0.0
    lm_head, micro_batches = find("lm_head", how.lm_head), share.sequences // share.micro_sequences
    slots, update, gradients = _optimizer(model, optim, share, how)
    widest = max((layer for layer, _ in model.layer_kinds), key=lambda layer: layer.mlp_width)
    # gradients in a block: of the MLP's hidden width as many as it keeps, and four of the stream's
    in_flight = find("mlp", how.mlp).kept(replace(at, layer=widest)) + 4 * _stream(model)
    ids = 24 * share.tokens  # int32 and int64, one batch ahead
    return Memory(
        weights=describe(model).nbytes() // how.shards + _rotary(model) + ids,
        gathered=_gathered(model, micro_batches) if how.shards > 1 else 0,
        slots=slots // how.shards,
        gradients=gradients,
        gradients_kept=gradients // how.shards,
        activations=int(blocks) + tokens * _ends_per_token(at, how),
        head_kept=int(lm_head.kept(at)),
        head=int(lm_head.beyond(at)),
        block=int(block) + int(tokens * in_flight),
        update=update // how.shards,
        micro_batches=micro_batches,
        compiled=how.compiled,
    )


def halo_tokens(model: ModelConfig, batch: BatchConfig, parts: int) -> int:
    """Of the last of so many slices of a sequence, which has the longest halo."""
    before = batch.sequence_tokens * (parts - 1) // parts
    widest = max((window.widest_tokens for window in model.windows.values()), default=batch.sequence_tokens)
    return min(before, round_up(widest, BLOCK_TOKENS))


def _optimizer(model: ModelConfig, optim: OptimConfig, share: BatchConfig, how: Execution) -> tuple[int, int, int]:
    """Bytes of slots, of what an update holds for a moment, and of gradients."""
    slots = update = gradients = 0
    for kind in moved(model, optim):
        rule, each = kind.rule, (kind.shape, kind.element_bytes)
        slots += kind.count * rule.slot_bytes(*each) // (how.table_shards if kind.is_dense_table else 1)
        slots += kind.nbytes if kind.group.every > 1 else 0  # gradients that wait for a later step
        update += kind.count * rule.update_bytes(kind.shape)
        if rule.gradient == "rows":
            gradients += kind.count * share.tokens * rule.row_gradient_bytes(*each)
        else:
            gradients += how.gradient_copies * kind.nbytes
    return slots, update, gradients


@dataclass(frozen=True)
class Moved:
    """Parameters of one group, shape and format, and what moves them."""

    group: ParamGroup
    rule: RuleFacts
    shape: tuple[int, ...]
    element_bytes: int
    count: int
    is_table: bool

    @property
    def nbytes(self) -> int:
        return self.count * math.prod(self.shape) * self.element_bytes

    @property
    def is_dense_table(self) -> bool:
        return self.is_table and self.rule.gradient == "dense"


def moved(model: ModelConfig, optim: OptimConfig) -> Iterator[Moved]:
    about, facts = describe(model), rules()
    groups, tables = param_groups(optim, about.groups), about.tables
    for (name, shape, dtype), count in about.kinds.items():
        yield Moved(groups[name], facts[groups[name].rule], shape, DTYPE_BYTES[dtype], count, name in tables)


def _gathered(model: ModelConfig, micro_batches: int) -> int:
    """Embeddings, head, this block and the next; of one micro-batch alone their gradients, too: none are whole then."""
    matrices = describe(model).nbytes("matrices")
    here = describe(model).nbytes() - matrices + 2 * matrices // model.num_layers
    return here * (2 if micro_batches == 1 else 1)


def _rotary(model: ModelConfig) -> int:
    if model.positions != "rotary":
        return 0
    dims = {model.head_dim, *(shape.qk_dim for shape in model.attending)}
    pairs = sum(max(1, round(dim // 2 * model.rotary.rotary_fraction)) for dim in dims)
    return 2 * model.rotary.max_tokens * pairs * DTYPE_BYTES[model.rotary.table_dtype]


def _stream(model: ModelConfig) -> int:
    """Bytes of one token in the residual stream."""
    return model.width * (FP32 if model.precision.mode == "autocast" else DTYPE_BYTES[model.precision.compute])


def _kept_per_token(at: Kept, how: Execution) -> list[tuple[float, int]]:
    """The bytes of one token that the backward pass of a block needs, for each kind of block with their number."""
    model, found = at.model, []
    with_halo = 1 + how.halo_tokens / at.sequence_tokens
    attention, qkv, mlp = find("attention", how.attention), find("qkv", how.qkv), find("mlp", how.mlp)
    mixed = _stream(model) if model.x0_mix and (qkv.custom or not how.compiled) else 0  # before mixing
    for layer, count in model.layer_kinds:
        here, held = replace(at, layer=layer), float(mixed)
        if layer.mlp_width:
            held += _norm(at) + mlp.kept(here)
        if layer.attention is not None:
            held += _norm(at) + qkv.kept(here) + with_halo * attention.kept(here)
        if model.dropout:  # which numbers of both branches were kept
            held += model.width * ((layer.mlp_width > 0) + (layer.attention is not None))
        found.append((held, count))
    return found


def _norm(at: Kept) -> int:
    """Input and result of a norm on the stream; uncompiled, the input in fp32, and what weights of RMS multiply."""
    kept = _stream(at.model) if at.compiled else FP32 * at.model.width
    weighted = FP32 * at.model.width if at.model.norm == "rms_weighted" and not at.compiled else 0
    return kept + weighted + at.compute_bytes * at.model.width


def _ends_per_token(at: Kept, how: Execution) -> int:
    """Outside the blocks: tokens and targets, the embedding's norm, a skip, rows of value tables, the last norm."""
    model = at.model
    embedding = FP32 * model.width if model.embedding_norm else 0
    skip = _stream(model) if model.unet_skips and not how.recompute else 0  # of the middle block; others are inputs
    value_rows = sum(model.value_table_widths.values())
    if how.recompute and model.value_path == "residual":
        value_rows += max(shape.v_width for shape in model.attending)
    return 16 + embedding + skip + value_rows * at.compute_bytes + _norm(at)
