"""Peak memory of one GPU. No torch.

Parameters, gradients and optimizer slots are counted; so is what the forward pass of a micro-batch keeps for the
backward pass, tensor by tensor. What the head needs beyond that is one fitted number, the bytes of a logit; the fast
head has the logits of one chunk of tokens at a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.lab.plan.work import BYTES, Profile, Setting, gradient_bytes, slot_bytes
from paceline.model.config import ModelConfig

GIB = 2**30
CHUNK_TOKENS = 8_192
"""Tokens of which the fast head and `--head.backend chunked` hold the logits."""
STARTS: dict[Profile, float] = {"reference": 2.0, "fast": 4.0}
"""Bytes of a logit where nothing was measured: as bf16, and twice that for product and gradient of a chunk."""
USABLE = 0.92
"""Share of a GPU's memory that a run can have; the rest is the context's, the libraries' and lost between blocks."""


@dataclass(frozen=True)
class MemoryFigure:
    """A measured peak."""

    source: str
    setting: Setting
    gib: float


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes by what they hold."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    logits: float

    @property
    def gib(self) -> float:
        return (self.parameters + self.gradients + self.optimizer + self.activations + self.logits) / GIB


def memory(at: Setting, bytes_per_logit: float) -> Memory:
    held = gradient_bytes(at.config.model)
    copied = at.cluster.gpus > 1 and not at.config.parallel.bucket_views
    return Memory(
        parameters=held,
        gradients=held * (2 if copied else 1),
        optimizer=slot_bytes(at.config),
        activations=at.micro_tokens * _kept_bytes(at),
        logits=bytes_per_logit * _logits(at),
    )


def fit_logits(profile: Profile, figures: Sequence[MemoryFigure]) -> float:
    """Bytes of a logit, from the peaks that were measured with this profile."""
    mine = [figure for figure in figures if figure.setting.profile == profile]
    if not mine:
        return STARTS[profile]
    known = [memory(figure.setting, 0.0).gib for figure in mine]
    logits = [_logits(figure.setting) / GIB for figure in mine]
    missing = [figure.gib - gib for figure, gib in zip(mine, known, strict=True)]
    return sum(a * b for a, b in zip(missing, logits, strict=True)) / sum(b * b for b in logits)


def _logits(at: Setting) -> float:
    """How many exist at once."""
    chunked = at.profile == "fast" or at.config.head.backend in ("chunked", "fused")
    return at.config.model.head_rows * (min(CHUNK_TOKENS, at.micro_tokens) if chunked else at.micro_tokens)


def _kept_bytes(at: Setting) -> float:
    """Of one token. With recomputation, each block's input and the inside of one block at a time."""
    m = at.config.model
    attentions = m.num_layers - len(m.attentionless)
    inside = m.num_layers * _block_bytes(m, at.profile) + attentions * _attention_bytes(m)
    tables = BYTES[m.precision.compute] * m.num_value_tables * m.kv_width
    if at.config.train.recompute:
        inside = inside / m.num_layers + m.num_layers * _stream_bytes(m) * m.width
    return inside + tables


def _stream_bytes(m: ModelConfig) -> int:
    return 4 if m.precision.mode == "autocast" else BYTES[m.precision.compute]


def _block_bytes(m: ModelConfig, profile: Profile) -> float:
    """Inputs of both branches, before and after their norm and mix; hidden values, once where the fused MLP derives the
    slope from its result."""
    streams = 3 if m.x0_mix else 2
    hidden = 1 if profile == "fast" and m.activation == "relu2" else 2
    return _stream_bytes(m) * streams * m.width + BYTES[m.precision.compute] * (2 * m.width + hidden * m.mlp_width)


def _attention_bytes(m: ModelConfig) -> float:
    """Queries and keys before and after norm and rotary, values before and after their mix, outputs, log-sums."""
    raw = (m.width + m.kv_width if m.qk_norm != "none" else 0) + (m.kv_width if m.value_path != "plain" else 0)
    return BYTES[m.precision.compute] * (raw + m.width + 2 * m.kv_width + m.width) + 4 * m.num_heads
