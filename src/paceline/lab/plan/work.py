"""What a step asks of one GPU, as seconds at the datasheet's rates. No torch.

Each piece of work names the resource that it is bound by; `efficiency` says how much of that resource a profile really
gets, so that a step is a sum of seconds over efficiencies. Bytes are counted in crossings of memory: how often a tensor
of the width of the stream, in the compute format, is read or written, forward and backward together. They are estimates
from the kernels of record 18's step on one H200, trimmed until memory's efficiency came out below 1; no fit moves them.
"""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Literal

from paceline.lab.plan.gpus import Cluster, Gpu
from paceline.lab.plan.visits import DOCUMENT_TOKENS, mean_visited_keys, visited_keys
from paceline.parallel.batch_split import rank_batch
from paceline.settings.data import BatchConfig
from paceline.settings.groups import param_groups, rules
from paceline.settings.model import ModelConfig, WindowKind
from paceline.settings.run import RunConfig
from paceline.settings.schedule import largest_batch, tokens_before
from paceline.settings.spec import DTYPE_BYTES, describe

Profile = Literal["reference", "fast"]
Resource = Literal["products", "attention", "memory", "newton_schulz", "link", "fixed"]

LAUNCH_S = 5e-6
"""Gap before a small kernel."""
LAUNCHES_PER_LAYER = 50
"""Kernels of one block, forward and backward."""
LAUNCHES_PER_MATRIX = 22
"""Kernels of one orthogonalisation: five iterations of three products, and what surrounds them."""
ALIGNED, MISALIGNED_COST = 8, 2.0
"""Rows of a head that are no multiple of 8 leave its rows of bf16 logits off the 16-byte steps that fast products load.
The cost is a guess, taken because record 4, which has such a head, is 16 % slower than predicted without it."""
CROSSINGS_OF_RULE = {"adam": 7.0, "muon": 10.0}
"""How often an update crosses memory, in sizes of what it moves: weight and slots read and written, the gradient read;
for Muon also the stacked gradients, directions and results."""
TILE, PROCESSORS = 128, 132
"""Side of a product's tile, and processors of a GPU that want one each: a small matrix leaves most of them idle."""
EVERY_RANK_COMPUTES_ALL = ("r04-muon", "r05-modern-arch")
"""Their scripts orthogonalise every matrix on every rank; those since record 6, and ours, share them."""

# How often kernels cross memory, in widths of their tensor:
STREAM_CROSSINGS, SKIP_CROSSINGS = 20.0, 7.0
"""The residual stream in a block (mixes, norms, sums), and a skip."""
ATTENTION_CROSSINGS = 12.0
"""Queries, keys, values, outputs and their gradients in the attention kernels."""
HEADS_CROSSINGS = {"reference": 16.0, "fast": 12.0}
"""Queries, keys and values between projection and attention."""
HIDDEN_CROSSINGS = {"reference": 5.0, "fast": 0.0}
"""MLP's hidden values: the fast activation is inside the products."""
LOGITS_BYTES = {"reference": 14.0, "fast": 6.0}
"""Bytes of a logit outside of the products: the fast ones are never fp32."""


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
        """Of a step, on one GPU; of a run whose batches change size, the mean."""
        return tokens_before(self.config, self.config.steps) // self.config.steps // self.cluster.gpus

    @property
    def share(self) -> BatchConfig:
        """Of the largest step, what one GPU does."""
        return rank_batch(largest_batch(self.config), self.cluster.gpus, self.config.parallel.context_parallel)

    @property
    def micro_tokens(self) -> int:
        return self.share.micro_sequences * self.share.sequence_tokens

    @property
    def compiled(self) -> bool:
        return self.config.train.compile and (self.cluster.gpus == 1 or self.config.parallel.context_parallel == 1)

    @property
    def shares_matrices(self) -> bool:
        return self.profile == "fast" or self.config.preset not in EVERY_RANK_COMPUTES_ALL

    @property
    def flops_per_s(self) -> float:
        return self.cluster.kind.flops_per_s(self.config.model.precision.compute)

    @property
    def bytes_per_s(self) -> float:
        return self.cluster.kind.memory_gb_s * 1e9


def profile_on(gpu: Gpu, wanted: Profile = "fast") -> Profile:
    """By which paths a run is computed there."""
    return wanted if gpu.own_kernels else "reference"


def computation(at: Setting) -> list[Work]:
    """Forward and backward passes of all micro-batches."""
    again = 4 / 3 if at.config.train.recompute else 1.0  # a second forward pass, of the blocks
    return [
        *(replace(work, seconds=work.seconds * again) for work in _blocks(at)),
        *_head(at),
        _embeddings(at),
        Work("idle", "fixed", LAUNCH_S * LAUNCHES_PER_LAYER * at.config.model.num_layers * at.tokens / at.micro_tokens),
    ]


def _blocks(at: Setting) -> list[Work]:
    model, profile, weights = at.config.model, at.profile, describe(at.config.model).product_weights
    keys = _keys(at)
    attending = sum(  # two products forward, twice that backward
        6 * keys[s.window] * s.num_heads * (s.qk_dim + s.v_dim) for s in model.attending
    )
    joined = sum((s.q_width + s.k_width + s.v_width) / 3 for s in model.attending)
    hidden = sum(layer.mlp_width for layer in model.layers)
    return [
        _products(at, "mlp", weights("mlp")),
        _crossings(at, "mlp", HIDDEN_CROSSINGS[profile] * hidden),
        _products(at, "attention_projections", weights("attention_projections")),
        _crossings(at, "norms_and_mixes", HEADS_CROSSINGS[profile] * joined),
        Work("attention", "attention", attending * at.tokens / at.flops_per_s),
        _crossings(at, "attention", ATTENTION_CROSSINGS * joined),
        _stream(at),
    ]


def _keys(at: Setting) -> dict[WindowKind, float]:
    """Keys that attention works on for a query, by window kind."""
    c, length = at.config, at.config.batch.sequence_tokens
    if at.window_tokens is not None:
        return dict.fromkeys(("short", "long"), visited_keys(c.model, at.window_tokens, length, at.document_tokens))
    return mean_visited_keys(c, document_tokens=at.document_tokens)


def _stream(at: Setting) -> Work:
    m = at.config.model
    mixed = m.precision.mode == "autocast" and m.precision.compute == "bf16"
    wide = 1.5 if mixed else 1.0  # the stream is fp32 then, what the branches read and write is not
    crossed = STREAM_CROSSINGS * m.num_layers + (SKIP_CROSSINGS * m.num_layers / 2 if m.unet_skips else 0)
    return _crossings(at, "norms_and_mixes", wide * crossed * m.width)


def _head(at: Setting) -> list[Work]:
    m = at.config.model
    cost = MISALIGNED_COST if m.lm_head_rows % ALIGNED and m.precision.compute == "bf16" else 1.0
    logits_bytes = LOGITS_BYTES[at.profile] * m.lm_head_rows * at.tokens
    return [
        _products(at, "head_and_loss", cost * m.lm_head_rows * m.width),
        Work("head_and_loss", "memory", logits_bytes / at.bytes_per_s),
    ]


def _embeddings(at: Setting) -> Work:
    """Lookups and their gradients (an fp32 sum into a dense table, cleared and rounded for each micro-batch), the sum
    of gradients over micro-batches, and the weights in the compute format."""
    m, micro_batches = at.config.model, at.tokens / at.micro_tokens
    row = m.width + sum(s.v_width for s in m.attending if s.value_table is not None)
    lookups = 14 * row * at.tokens
    per_micro_batch = 10 * row * m.embedding_rows + 6 * describe(m).product_weights()
    per_micro_batch += 3 * (matrix_bytes(m) + table_bytes(m))
    return Work("other", "memory", (lookups + per_micro_batch * micro_batches) / at.bytes_per_s)


def _products(at: Setting, kind: str, weights: float) -> Work:
    """Of every token with so many weights: 2 FLOP forward and 4 backward each."""
    return Work(kind, "products", 6 * weights * at.tokens / at.flops_per_s)


def _crossings(at: Setting, kind: str, widths_per_token: float) -> Work:
    """Of so many numbers in the compute format for each token."""
    crossed_bytes = widths_per_token * DTYPE_BYTES[at.config.model.precision.compute] * at.tokens
    return Work(kind, "memory", crossed_bytes / at.bytes_per_s)


def optimizer(at: Setting) -> list[Work]:
    model, rule = at.config.model, matrix_rule(at.config)
    tables = table_bytes(model) / (at.cluster.gpus if at.config.parallel.zero1 else 1)
    crossings = CROSSINGS_OF_RULE.get(rule)
    if crossings is None:  # not measured: weights and slots read and written, the gradient read
        crossings = 3.0 + 2.0 * rules()[rule].slot_bytes((1024, 1024), 4) / (4 * 1024**2)
    moved = CROSSINGS_OF_RULE["adam"] * tables + crossings * matrix_bytes(model)
    work = [Work("optimizer", "memory", moved / at.bytes_per_s)]
    if rule == "muon":
        for (rows, columns), count in matrix_shapes(model).items():
            work += _orthogonalised(at, rows, columns, count)
    return work


def matrix_rule(config: RunConfig) -> str:
    """The rule that moves the matrices."""
    return param_groups(config.optim, describe(config.model).groups)["matrices"].rule


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
    return Counter(shape for p in describe(m).parameters if p.group == "matrices" for shape in p.matrices())


def matrix_bytes(m: ModelConfig) -> int:
    return describe(m).nbytes("matrices")


def table_bytes(m: ModelConfig) -> int:
    """Of embeddings and head, in the format in which they, their gradients and each of their moments are kept."""
    return describe(m).nbytes("embeddings", "value_embeddings", "lm_head")
