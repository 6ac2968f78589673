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
from paceline.metrics.flops import attention_flops, head_share
from paceline.parallel.batch_split import rank_batch
from paceline.parallel.memory_model import Moved, moved
from paceline.settings.data import BatchConfig
from paceline.settings.model import WindowKind
from paceline.settings.run import RunConfig
from paceline.settings.schedule import largest_batch, mean_batch_tokens, sampled_steps, schedule
from paceline.settings.spec import DTYPE_BYTES, describe

Profile = Literal["reference", "fast"]
Resource = Literal["products", "attention", "memory", "newton_schulz", "link", "fixed"]

LAUNCH_S = 5e-6  # gap before a small kernel
LAUNCHES_PER_LAYER = 50  # kernels of one block, forward and backward
LAUNCHES_PER_MATRIX = 22  # kernels of one orthogonalisation: five iterations of three products, and what surrounds them
ALIGNED, MISALIGNED_COST = 8, 2.0
"""Rows of a head that are no multiple of 8 leave its rows of bf16 logits off the 16-byte steps that fast products load.
The cost is a guess, taken because record 4, which has such a head, is 16 % slower than predicted without it."""
TILE, PROCESSORS = 128, 132  # side of a product's tile, and processors that want one each: a small matrix fills few
EVERY_RANK_COMPUTES_ALL = ("r04-muon", "r05-modern-arch")  # as their scripts do; from record 6 on matrices are shared

# How often kernels cross memory, in widths of their tensor:
STREAM_CROSSINGS, SKIP_CROSSINGS = 20.0, 7.0  # the residual stream in a block (mixes, norms, sums), and a skip
ATTENTION_CROSSINGS = 12.0  # queries, keys, values, outputs and their gradients in the attention kernels
HEADS_CROSSINGS = {"reference": 16.0, "fast": 12.0}  # queries, keys and values between projection and attention
HIDDEN_CROSSINGS = {"reference": 5.0, "fast": 0.0}  # MLP's hidden values: the fast activation is inside the products
LOGITS_BYTES = {"reference": 14.0, "fast": 6.0}  # of a logit outside of the products: the fast ones are never fp32


@dataclass(frozen=True)
class Work:
    kind: str  # class of work, in the words of `paceline bench step`
    resource: Resource
    seconds: float  # at the datasheet's rate of the resource; as they are for `fixed`


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A run on a cluster, as one GPU sees it."""

    config: RunConfig
    cluster: Cluster
    profile: Profile
    document_tokens: float = DOCUMENT_TOKENS
    window_tokens: int | None = None  # a fixed window; None: those of the schedule
    step: int | None = None  # one step of the schedule; None: the mean over all

    @property
    def tokens(self) -> int:
        """Of a step, on one GPU; of a run whose batches change size, the mean."""
        tokens = int(mean_batch_tokens(self.config)) if self.step is None else self.batch.tokens
        return tokens // self.cluster.gpus

    @property
    def batch(self) -> BatchConfig:
        """Of its step; of all of them, the largest."""
        if self.step is None:
            return largest_batch(self.config)
        sequences = schedule(self.config, self.step).sequences
        return self.config.batch.with_tokens(sequences * self.config.batch.sequence_tokens)

    @property
    def share(self) -> BatchConfig:
        return rank_batch(self.batch, self.cluster.gpus, self.config.parallel.context_parallel)

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
    attending = attention_flops(model, _keys(at))
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
    c = at.config
    if at.window_tokens is not None:
        keys = visited_keys(c.model, at.window_tokens, c.batch.sequence_tokens, at.document_tokens)
        return {shape.window: keys for shape in c.model.attending}
    return mean_visited_keys(c, sampled_steps(c.steps) if at.step is None else [at.step], at.document_tokens)


def _stream(at: Setting) -> Work:
    m = at.config.model
    mixed = m.precision.mode == "autocast" and m.precision.compute == "bf16"
    wide = 1.5 if mixed else 1.0  # the stream is fp32 then, what the branches read and write is not
    crossed = STREAM_CROSSINGS * m.num_layers + (SKIP_CROSSINGS * m.num_layers / 2 if m.unet_skips else 0)
    return _crossings(at, "norms_and_mixes", wide * crossed * m.width)


def _head(at: Setting) -> list[Work]:
    heads = [product for product in describe(at.config.model).products if product.counted_as == "head_and_loss"]
    misaligned = MISALIGNED_COST if at.config.model.precision.compute == "bf16" else 1.0
    share = head_share(at.config, sampled_steps(at.config.steps) if at.step is None else [at.step])
    logits_bytes = LOGITS_BYTES[at.profile] * share * sum(head.outputs for head in heads) * at.tokens
    weights = share * sum((misaligned if h.outputs % ALIGNED else 1.0) * h.weights for h in heads)
    return [
        _products(at, "head_and_loss", weights),
        Work("head_and_loss", "memory", logits_bytes / at.bytes_per_s),
    ]


def _embeddings(at: Setting) -> Work:
    """Lookups and their gradients (an fp32 sum into a dense table, cleared and rounded for each micro-batch), the sum
    of gradients over micro-batches, and the weights in the compute format."""
    about, by_rows = describe(at.config.model), {m.group.name for m in moved_of(at) if m.rule.gradient == "rows"}
    multiplied = {product.name for product in about.products}
    looked_up = [p for p in about.parameters if p.table and p.name not in multiplied]
    lookups = 14 * sum(table.shape[1] for table in looked_up) * at.tokens
    per_micro_batch = 10 * sum(table.numel for table in looked_up if table.group not in by_rows)
    per_micro_batch += 6 * about.product_weights() + 3 * (gradient_bytes(at, tables=True) + gradient_bytes(at))
    return Work("other", "memory", (lookups + per_micro_batch * at.tokens / at.micro_tokens) / at.bytes_per_s)


def _products(at: Setting, kind: str, weights: float) -> Work:
    """Of every token with so many weights: 2 FLOP forward and 4 backward each."""
    return Work(kind, "products", 6 * weights * at.tokens / at.flops_per_s)


def _crossings(at: Setting, kind: str, widths_per_token: float) -> Work:
    """Of so many numbers in the compute format for each token."""
    crossed_bytes = widths_per_token * DTYPE_BYTES[at.config.model.precision.compute] * at.tokens
    return Work(kind, "memory", crossed_bytes / at.bytes_per_s)


def optimizer(at: Setting) -> list[Work]:
    """Of this GPU's share. Groups that do not move at every step count by their share of the steps."""
    crossed = 0.0
    for kind in moved_of(at):
        ranks = at.cluster.gpus if kind.is_dense_table and at.config.parallel.zero1 else 1
        update = kind.rule.crossed_bytes(kind.shape, kind.element_bytes, at.tokens * at.cluster.gpus)
        crossed += kind.count * update / kind.group.every / ranks
    work = [Work("optimizer", "memory", crossed / at.bytes_per_s)]
    for shape, count in orthogonal_shapes(at.config).items():
        mine, (small, large) = -(-count // at.cluster.gpus) if at.shares_matrices else count, sorted(shape)
        flops = mine * at.config.optim.muon.ns_steps * (4 * small**2 * large + 2 * small**3)
        batch = mine if at.profile == "fast" else 1  # matrices at once: one by one in the scripts, as one batch in ours
        busy = min(1.0, batch * (-(-small // TILE)) ** 2 / PROCESSORS)
        work.append(Work("optimizer", "newton_schulz", flops / (busy * at.flops_per_s)))
        work.append(Work("optimizer", "fixed", LAUNCH_S * LAUNCHES_PER_MATRIX * mine / batch))
    return work


def moved_of(at: Setting) -> list[Moved]:
    return list(moved(at.config.model, at.config.optim))


def orthogonal_shapes(config: RunConfig) -> Counter[tuple[int, int]]:
    """Of matrices whose updates are orthogonal (rows, columns), to their number; joined projections count as parts."""
    orthogonal = {m.group.name for m in moved(config.model, config.optim) if m.rule.orthogonal}
    return Counter(shape for p in describe(config.model).parameters if p.group in orthogonal for shape in p.matrices())


def gradient_bytes(at: Setting, *, tables: bool = False) -> int:
    """Of the dense gradients of tables, or of everything else; weights are kept in the same format."""
    dense = (kind for kind in moved_of(at) if kind.rule.gradient == "dense")
    return sum(kind.nbytes for kind in dense if kind.is_table == tables)
