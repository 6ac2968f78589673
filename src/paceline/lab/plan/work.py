"""What a step asks of one GPU, as seconds at the datasheet's rates. No torch.

Each piece of work names the resource that it is bound by; `efficiency` says how much of that resource a profile really
gets, so that a step is a sum of seconds over efficiencies. Bytes are counted in crossings of memory: how often a tensor
of the width of the stream, in the compute format, is read or written, forward and backward together. They are estimates
from the kernels of record 18's step on one H200, trimmed until memory's efficiency came out below 1; no fit moves them.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from paceline.data.config import BatchConfig
from paceline.lab.plan.gpus import Cluster
from paceline.lab.plan.visits import DOCUMENT_TOKENS, mean_visited_keys, visited_keys
from paceline.metrics.flops import block_matrix_weights
from paceline.model.config import DType, ModelConfig
from paceline.parallel.share import share_of_batch
from paceline.train.config import RunConfig

Profile = Literal["reference", "fast"]
Resource = Literal["products", "attention", "memory", "newton_schulz", "link", "fixed"]
BYTES: dict[DType, int] = {"bf16": 2, "fp32": 4}

LAUNCH_S = 5e-6
"""Gap before a small kernel."""
LAUNCHES_PER_LAYER = 50
"""Kernels of one block, forward and backward."""
LAUNCHES_PER_MATRIX = 22
"""Kernels of one orthogonalisation: five iterations of three products, and what surrounds them."""
ALIGNED, MISALIGNED_COST = 8, 2.0
"""Rows of a head that are no multiple of 8 leave its rows of bf16 logits off the 16-byte steps that fast products load.
The cost is a guess, taken because record 4, which has such a head, is 16 % slower than foretold without it."""
ADAM_CROSSINGS, MUON_CROSSINGS = 7.0, 10.0
"""How often an update crosses memory, in sizes of what it moves: weight and slots read and written, the gradient read;
for Muon also the stacked gradients, directions and results."""
TILE, PROCESSORS = 128, 132
"""Side of a product's tile, and processors of a GPU that want one each: a small matrix leaves most of them idle."""
EVERY_RANK_COMPUTES_ALL = ("r04-muon", "r05-modern-arch")
"""Their scripts orthogonalise every matrix on every rank; those since record 6, and ours, share them."""


@dataclass(frozen=True, kw_only=True)
class Crossings:
    """How often a profile's kernels cross memory, in widths of their tensor."""

    logits_bytes: float
    """Bytes of a logit outside of the products."""
    hidden: float
    """MLP's hidden values."""
    heads: float
    """Queries, keys and values between projection and attention."""
    stream: float = 20.0
    """The residual stream in a block: mixes, norms, sums."""
    skip: float = 7.0
    attention: float = 12.0
    """Queries, keys, values, outputs and their gradients in the attention kernels."""


CROSSINGS = {
    "reference": Crossings(logits_bytes=14, hidden=5, heads=16),
    "fast": Crossings(logits_bytes=6, hidden=0, heads=12),  # activation inside the products, no fp32 logits
}


@dataclass(frozen=True)
class Work:
    kind: str
    """Class of work, in the words of `paceline bench step`."""
    resource: Resource
    seconds: float
    """At the datasheet's rate of the resource; as they are for `fixed`."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A run on a cluster, as one GPU sees it."""

    config: RunConfig
    cluster: Cluster
    profile: Profile
    document_tokens: float = DOCUMENT_TOKENS
    window_tokens: int | None = None
    """A fixed window; None: the mean over the schedule."""

    @property
    def tokens(self) -> int:
        """Of a step, on one GPU."""
        return self.config.batch.tokens // self.cluster.gpus

    @property
    def share(self) -> BatchConfig:
        """Of a step, what one GPU does."""
        return share_of_batch(self.config.batch, self.cluster.gpus, self.config.parallel.split_sequence)

    @property
    def micro_tokens(self) -> int:
        return self.share.micro_sequences * self.share.sequence_tokens

    @property
    def compiled(self) -> bool:
        return self.config.train.compile and (self.cluster.gpus == 1 or not self.config.parallel.talks_inside)

    @property
    def shares_matrices(self) -> bool:
        return self.profile == "fast" or self.config.preset not in EVERY_RANK_COMPUTES_ALL

    @property
    def flops_per_s(self) -> float:
        return self.cluster.kind.flops_per_s(self.config.model.precision.compute)

    @property
    def bytes_per_s(self) -> float:
        return self.cluster.kind.memory_gb_s * 1e9


def computation(at: Setting) -> list[Work]:
    """Forward and backward passes of all micro-batches."""
    again = 4 / 3 if at.config.train.recompute else 1.0  # a second forward pass, of the blocks
    return [
        *(Work(work.kind, work.resource, work.seconds * again) for work in (*_mlp(at), *_attention(at), _stream(at))),
        *_head(at),
        _embeddings(at),
        Work("idle", "fixed", LAUNCH_S * LAUNCHES_PER_LAYER * at.config.model.num_layers * at.tokens / at.micro_tokens),
    ]


def _mlp(at: Setting) -> list[Work]:
    m = at.config.model
    flops = 6 * 2 * m.width * m.mlp_width * m.num_layers * at.tokens
    crossed = CROSSINGS[at.profile].hidden * m.mlp_width * m.num_layers
    return [Work("mlp", "products", flops / at.flops_per_s), Work("mlp", "memory", _seconds(at, crossed))]


def _attention(at: Setting) -> list[Work]:
    m, passes = at.config.model, CROSSINGS[at.profile]
    layers = m.num_layers - len(m.attentionless)
    weights = 2 * m.width * (m.width + m.kv_width) * layers
    attending = 12 * _keys(at) * m.width * layers * at.tokens  # two products forward, twice that backward
    joined = (m.width + 2 * m.kv_width) / 3 * layers
    return [
        Work("attention_projections", "products", 6 * weights * at.tokens / at.flops_per_s),
        Work("norms_and_mixes", "memory", _seconds(at, passes.heads * joined)),
        Work("attention", "attention", attending / at.flops_per_s),
        Work("attention", "memory", _seconds(at, passes.attention * joined)),
    ]


def _keys(at: Setting) -> float:
    model, length = at.config.model, at.config.batch.sequence_tokens
    if at.window_tokens is not None:
        return visited_keys(model, at.window_tokens, length, at.document_tokens)
    return mean_visited_keys(model, sequence_tokens=length, steps=at.config.steps, document_tokens=at.document_tokens)


def _stream(at: Setting) -> Work:
    m, passes = at.config.model, CROSSINGS[at.profile]
    mixed = m.precision.mode == "autocast" and m.precision.compute == "bf16"
    wide = 1.5 if mixed else 1.0  # the stream is fp32 then, what the branches read and write is not
    crossed = (passes.stream * m.num_layers + (passes.skip * m.num_layers / 2 if m.unet_skips else 0)) * m.width
    return Work("norms_and_mixes", "memory", wide * _seconds(at, crossed))


def _head(at: Setting) -> list[Work]:
    m = at.config.model
    cost = MISALIGNED_COST if m.head_rows % ALIGNED and m.precision.compute == "bf16" else 1.0
    return [
        Work("head_and_loss", "products", cost * 6 * m.head_rows * m.width * at.tokens / at.flops_per_s),
        Work("head_and_loss", "memory", CROSSINGS[at.profile].logits_bytes * m.head_rows * at.tokens / at.bytes_per_s),
    ]


def _embeddings(at: Setting) -> Work:
    """Lookups and their gradients (an fp32 sum into a dense table, cleared and rounded for each micro-batch), the sum
    of gradients over micro-batches, and the weights in the compute format."""
    m, micro_batches = at.config.model, at.tokens / at.micro_tokens
    row = m.width + m.kv_width * sum(table is not None for table in m.value_table_of_layer)
    lookups = 14 * row * at.tokens
    per_micro_batch = 10 * row * m.embedding_rows + 6 * _matrix_weights(m) + 3 * (matrix_bytes(m) + table_bytes(m))
    return Work("other", "memory", (lookups + per_micro_batch * micro_batches) / at.bytes_per_s)


def _seconds(at: Setting, widths_per_token: float) -> float:
    """Of so many numbers in the compute format for each token."""
    return widths_per_token * BYTES[at.config.model.precision.compute] * at.tokens / at.bytes_per_s


def optimizer(at: Setting) -> list[Work]:
    model, muon = at.config.model, at.config.optim.matrices == "muon"
    tables = table_bytes(model) / (at.cluster.gpus if at.config.parallel.shard_adam else 1)
    moved = ADAM_CROSSINGS * tables + (MUON_CROSSINGS if muon else ADAM_CROSSINGS) * matrix_bytes(model)
    work = [Work("optimizer", "memory", moved / at.bytes_per_s)]
    if muon:
        for (rows, columns), count in matrix_shapes(model).items():
            work += _orthogonalised(at, rows, columns, count)
    return work


def _orthogonalised(at: Setting, rows: int, columns: int, count: int) -> list[Work]:
    """Newton–Schulz of this GPU's share of `count` matrices: one by one in the scripts, as one batch in ours."""
    mine = -(-count // at.cluster.gpus) if at.shares_matrices else count
    small, large = sorted((rows, columns))
    flops = mine * at.config.optim.muon.ns_steps * (4 * small**2 * large + 2 * small**3)
    batch = mine if at.profile == "fast" else 1
    busy = min(1.0, batch * (-(-small // TILE)) ** 2 / PROCESSORS)
    return [
        Work("optimizer", "newton_schulz", flops / (busy * at.flops_per_s)),
        Work("optimizer", "fixed", LAUNCH_S * LAUNCHES_PER_MATRIX * mine / batch),
    ]


def matrix_shapes(m: ModelConfig) -> Counter[tuple[int, int]]:
    """(rows, columns) of what Muon moves, to their number; a joined projection counts as its parts."""
    attentions = m.num_layers - len(m.attentionless)
    shapes: Counter[tuple[int, int]] = Counter()
    shapes[m.width, m.width] += 2 * attentions
    shapes[m.kv_width, m.width] += 2 * attentions
    shapes[m.mlp_width, m.width] += m.num_layers
    shapes[m.width, m.mlp_width] += m.num_layers
    return shapes


def _matrix_weights(m: ModelConfig) -> int:
    return block_matrix_weights(m) + m.head_rows * m.width


def matrix_bytes(m: ModelConfig) -> int:
    """Of the blocks' matrices, which are kept in fp32."""
    return 4 * block_matrix_weights(m)


def table_bytes(m: ModelConfig) -> int:
    """Of embeddings and head, in the format in which they, their gradients and each of their moments are kept."""
    embeddings = m.embedding_rows * (m.width + m.num_value_tables * m.kv_width)
    return BYTES[m.precision.embeddings] * embeddings + (0 if m.tied_head else 4 * m.head_rows * m.width)
