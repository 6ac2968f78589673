"""How much memory a step takes on one rank, by formula. No torch.

A step is fullest at one of three moments, and the model is the largest of them on top of what is always there (weights,
optimizer slots, tables, the batch): at the head, when all activations are kept and logits exist; in the backward pass
of a block, which under recomputation holds that block's activations as well; and in the update. What the backward pass
keeps is counted tensor by tensor, in the order of `model/block.py`, for uncompiled code and for compiled code, where
pointwise results are computed again rather than kept.

Tests hold it against reality: uncompiled, against what autograd keeps (found: within 2 %); compiled, against peaks that
were measured on an H200 (found: 0 to 5 % off). Not in it: the allocator's holes and the driver's own memory, for
which who asks leaves a margin. A process on a CPU is 1.0 to 1.4 GiB larger than foretold (record 18 at a quarter: 4.0
GiB resident for 3.1, 2.1 for 0.7 with recomputed blocks): libraries, the start of the weights, memory not given back.
What shards save (`parallel/shards.py`) is counted, but no peak of a sharded run was measured yet.
"""

from dataclasses import dataclass
from itertools import pairwise

from paceline.core.units import BLOCK_TOKENS, human_bytes, round_up
from paceline.data.config import BatchConfig
from paceline.metrics.flops import block_matrix_weights, parameter_counts
from paceline.model.config import ModelConfig
from paceline.optim.config import OptimConfig

DTYPE_BYTES = {"fp32": 4, "bf16": 2}
FP32 = 4
ATTENTION_CHUNK_TOKENS, DENSE_LIMIT_TOKENS = 512, 4_096
"""As in model/attention.py, which imports torch; a test holds them together, and those below."""
FUSED_CHUNK_TOKENS = 16_384
"""As in kernels/head_loss_fused.py."""
CHUNK_LOGITS, MIN_CHUNK_TOKENS = 1 << 19, 256
"""As in kernels/head_loss.py."""


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How a micro-batch is carried out: back ends by the names that the settings use."""

    attention: str = "reference"
    heads: str = "reference"
    mlp: str = "reference"
    head: str = "chunked"
    head_chunk_tokens: int | None = None
    compiled: bool = False
    recompute: bool = False
    gradient_copies: int = 1
    """Of each gradient: 2 where ranks exchange copies instead of views."""
    shards: int = 1
    """Ranks that each keep a share of weights, gradients and slots."""
    halo_tokens: int = 0
    """Tokens that attention fetches to the left of each sequence, if that is a slice."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one rank."""

    weights: int
    """With the rotary tables and two batches of tokens."""
    gathered: int
    """Of other ranks' weights, what is here during forward and backward pass, with its gradients."""
    slots: int
    gradients: int
    """Between micro-batches."""
    gradients_kept: int
    """In the update."""
    activations: int
    """Kept for the backward pass of one micro-batch, up to the head."""
    head_kept: int
    """The same of head and loss."""
    head: int
    """What exists at the head beyond these."""
    block: int
    """The same in the backward pass of a block: its gradients and, under recomputation, its activations."""
    update: int
    """The same in the optimizer's step."""
    micro_batches: int
    compiled: bool

    @property
    def always(self) -> int:
        return self.weights + self.slots

    @property
    def peak(self) -> int:
        """At the fullest moment."""
        held = self.gradients if self.micro_batches > 1 else 0  # those of the micro-batches before
        fresh = self.gradients if self.compiled else 0  # compiled code hands them over at its end
        at_head = held + self.activations + self.head_kept + self.head
        in_blocks = held + self.activations + self.block
        at_the_end = held + fresh + self.block
        in_passes = self.gathered + max(at_head, in_blocks, at_the_end)
        return self.always + max(in_passes, self.gradients_kept + self.update)

    def __str__(self) -> str:
        return human_bytes(self.peak)


def step_memory(model: ModelConfig, optim: OptimConfig, share: BatchConfig, how: Execution) -> Memory:
    """Of a step of which this rank computes `share`."""
    tokens = share.micro_sequences * share.sequence_tokens
    kept, cast_weights = _kept_per_token(model, share, how), _cast(model, block_matrix_weights(model))
    if how.recompute:
        blocks = float(tokens * model.num_layers * _stream(model))
        waiting = model.num_value_tables * _compute(model) * model.kv_width  # gradients of rows that two layers use
        block = tokens * (max(kept) + waiting) + cast_weights / model.num_layers
    else:
        blocks, block = tokens * sum(kept) + cast_weights, 0.0
    head_kept, head = _head(model, tokens, how)
    micro_batches = share.sequences // share.micro_sequences
    gradients = how.gradient_copies * _weights(model)
    return Memory(
        weights=_weights(model) // how.shards + _rotary(model) + 24 * share.tokens,  # int32, int64 ids, one batch ahead
        gathered=_gathered(model, micro_batches) if how.shards > 1 else 0,
        slots=_slots(model, optim) // how.shards,
        gradients=gradients,
        gradients_kept=gradients // how.shards,
        activations=int(blocks) + tokens * _ends_per_token(model, how),
        head_kept=head_kept,
        head=head,
        block=int(block) + tokens * _backward_per_token(model, how),
        update=_update(model, optim) // how.shards,
        micro_batches=micro_batches,
        compiled=how.compiled,
    )


def halo_tokens(model: ModelConfig, batch: BatchConfig, parts: int) -> int:
    """Of the last of so many slices of a sequence, which has the longest halo."""
    before = batch.sequence_tokens * (parts - 1) // parts
    return min(before, round_up(model.window.widest_tokens, BLOCK_TOKENS))


def _weights(model: ModelConfig) -> int:
    tables, rest, scalars = _by_class(model)
    return tables + rest + scalars


def _by_class(model: ModelConfig) -> tuple[int, int, int]:
    """Bytes of embedding and value tables; of head and matrices, which are fp32; of scalars."""
    counts, formats = parameter_counts(model), model.precision
    tables = (counts["token_embedding"] + counts["value_embeddings"]) * DTYPE_BYTES[formats.embeddings]
    rest = (counts["head"] + counts["block_matrices"]) * FP32
    return tables, rest, counts["scalars"] * DTYPE_BYTES[formats.scalars]


def _slots(model: ModelConfig, optim: OptimConfig) -> int:
    """Adam has two of the parameter's format, Muon one of fp32."""
    matrices = block_matrix_weights(model) * FP32
    return 2 * (_weights(model) - matrices) + (1 if optim.matrices == "muon" else 2) * matrices


def _update(model: ModelConfig, optim: OptimConfig) -> int:
    """Muon holds all directions, and of the stack in hand gradients or iterates."""
    return 2 * block_matrix_weights(model) * FP32 if optim.matrices == "muon" else 0


def _gathered(model: ModelConfig, micro_batches: int) -> int:
    """Embeddings, head, the block in hand and the next one; of one micro-batch alone, their gradients, too, since then
    there are no whole ones."""
    matrices = block_matrix_weights(model) * FP32
    here = _weights(model) - matrices + 2 * matrices // model.num_layers
    return here * (2 if micro_batches == 1 else 1)


def _rotary(model: ModelConfig) -> int:
    pairs = max(1, round(model.head_dim // 2 * model.rotary.turning_share))
    return 2 * model.rotary.max_tokens * pairs * DTYPE_BYTES[model.rotary.table_dtype]


def _compute(model: ModelConfig) -> int:
    return DTYPE_BYTES[model.precision.compute]


def _stream(model: ModelConfig) -> int:
    """Bytes of one token in the residual stream."""
    return model.width * (FP32 if model.precision.mode == "autocast" else _compute(model))


def _cast(model: ModelConfig, weights: int) -> int:
    """Bytes of fp32 weights in the format of the products, where that is another."""
    c = _compute(model)
    return 0 if c == FP32 else c * weights


def _kept_per_token(model: ModelConfig, share: BatchConfig, how: Execution) -> list[float]:
    """For each block the bytes of one token that its backward pass needs."""
    mlp = _norm(model, how) + _mlp(model, how)
    mixed = _stream(model) if model.x0_mix and not (how.compiled and how.heads != "fused") else 0  # before mixing
    with_halo = 1 + how.halo_tokens / share.sequence_tokens
    attention = _norm(model, how) + _heads(model, how) + with_halo * _attention(model, share, how)
    return [mixed + mlp + (0 if layer in model.attentionless else attention) for layer in range(model.num_layers)]


def _norm(model: ModelConfig, how: Execution) -> int:
    """Input and result of a norm on the stream. Uncompiled, the input is kept in fp32."""
    return (_stream(model) if how.compiled else FP32 * model.width) + _compute(model) * model.width


def _heads(model: ModelConfig, how: Execution) -> int:
    """From the projections to what attention takes; the latter is counted there."""
    c, values = _compute(model), model.kv_width
    queries_and_keys = model.width + values
    before_mix = c * values if model.value_path != "plain" else 0
    if how.heads == "fused":  # norms are undone from their results and scales
        return before_mix + FP32 * (model.num_heads + model.kv_heads)
    before_norm = 0 if model.qk_norm == "none" else (c if how.compiled else FP32) * queries_and_keys
    if how.compiled:
        return before_mix + before_norm
    if model.qkv == "fused":  # the values are a view of the joined projection, which they keep alive
        before_norm = max(before_norm, c * queries_and_keys)
    elif _stream(model) != c * model.width:  # each projection casts the stream for itself
        before_norm += 2 * c * model.width
    return before_mix + before_norm


def _attention(model: ModelConfig, share: BatchConfig, how: Execution) -> float:
    """Queries, keys, values, result and the logarithm of its denominator; for the reference also its mask, as numbers,
    and what is held more than once."""
    c = _compute(model)
    if how.attention != "reference" or (model.window.unit == "none" and not model.document_mask):
        return c * 2 * (model.width + model.kv_width) + FP32 * model.num_heads
    masked_keys, key_copies, result_copies = _reference_attention(model, share)
    masks = 1.0 if model.document_mask else 1 / share.micro_sequences  # of each sequence, or one for all
    held = (1 + 2 * key_copies + result_copies) * model.width
    return c * held + FP32 * model.num_heads + c * masked_keys * masks


def _reference_attention(model: ModelConfig, share: BatchConfig) -> tuple[float, float, float]:
    """Of the reference: keys that a query is masked against, and how often keys (and values) and results are held."""
    tokens, windowed = share.sequence_tokens, model.window.unit != "none"
    reach = round_up(model.window.widest_tokens, BLOCK_TOKENS) if windowed else tokens
    if tokens <= DENSE_LIMIT_TOKENS or tokens % BLOCK_TOKENS or reach + ATTENTION_CHUNK_TOKENS >= tokens:
        ends = [min(first + ATTENTION_CHUNK_TOKENS, tokens) for first in range(0, tokens, ATTENTION_CHUNK_TOKENS)]
        rows = [end - start for start, end in pairwise([0, *ends])]
        masked = sum(n * end for n, end in zip(rows, ends, strict=True)) / tokens  # rows see the keys before their end
        return masked, 1.0, 2.0  # results are put together
    keys = reach + ATTENTION_CHUNK_TOKENS
    overlap = keys / ATTENTION_CHUNK_TOKENS if share.micro_sequences > 1 else 1 + reach / tokens  # alone: views
    return keys, overlap, 1.0


def _mlp(model: ModelConfig, how: Execution) -> int:
    """The activated values, or what they come from; uncompiled, both."""
    return (1 if how.compiled or how.mlp == "fused" else 2) * _compute(model) * model.mlp_width


def _ends_per_token(model: ModelConfig, how: Execution) -> int:
    """Outside the blocks: tokens and targets, the embedding's norm, a skip, rows of value tables, the last norm."""
    embedding = FP32 * model.width if model.embedding_norm else 0
    skip = _stream(model) if model.unet_skips and not how.recompute else 0  # of the middle block; others are inputs
    value_rows = model.num_value_tables + (how.recompute and model.value_path == "residual")
    return 16 + embedding + skip + value_rows * _compute(model) * model.kv_width + _norm(model, how)


def _backward_per_token(model: ModelConfig, how: Execution) -> int:
    """Gradients in flight in a block: one of the MLP's hidden width, uncompiled two, and four of the stream's."""
    hidden = 1 if how.compiled or how.mlp == "fused" else 2
    return hidden * _compute(model) * model.mlp_width + 4 * _stream(model)


def _head(model: ModelConfig, tokens: int, how: Execution) -> tuple[int, int]:
    """(kept for the backward pass, beyond that at the fullest) of head and loss."""
    c, rows, matrix = _compute(model), model.head_rows, model.head_rows * model.width
    cast = _cast(model, matrix)
    if how.head == "reference" and how.compiled:  # logits, and their gradients beside them
        return tokens * rows * c + cast, tokens * rows * c
    if how.head == "reference":  # the log of the softmax and the cap's tanh are kept
        return tokens * rows * FP32 * (1 if model.softcap is None else 2) + cast, tokens * rows * FP32 * 2
    logits, gradient = rows * min(tokens, head_chunk_tokens(model, how)), (FP32 + c) * matrix
    if how.head == "fused":  # makes the gradients in the forward pass and keeps them
        return c * (tokens * model.width + matrix), c * logits + gradient + cast
    return cast, (3 * FP32 + c) * logits + gradient + c * tokens * model.width


def head_chunk_tokens(model: ModelConfig, how: Execution) -> int:
    """Tokens whose logits exist at once."""
    if how.head_chunk_tokens is not None:
        return how.head_chunk_tokens
    if how.head == "fused":
        return FUSED_CHUNK_TOKENS
    return max(MIN_CHUNK_TOKENS, CHUNK_LOGITS // model.head_rows)
