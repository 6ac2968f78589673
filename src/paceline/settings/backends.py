"""Which back end computes what; `backends/` lists them. And how the plain ones cut their work, which the memory model
has to know. No torch."""

from dataclasses import dataclass
from typing import Annotated

from paceline.core.units import BLOCK_TOKENS, round_up
from paceline.settings.limits import Limited, at_least
from paceline.settings.model import ModelConfig, WindowKind

CHUNK_TOKENS = 512
"""Queries of one chunk of attention: a multiple of the block, large enough to keep the products busy."""
DENSE_LIMIT_TOKENS = 4_096
"""Up to here a dense mask is small, and one product is faster than chunks."""
CHUNK_LOGITS = 1 << 19
"""Logits of one chunk of the head: 2 MB of fp32."""
MIN_CHUNK_TOKENS = 256
"""But never fewer tokens than this, or a large vocabulary would leave products too thin."""
FUSED_CHUNK_TOKENS = 16_384
"""Tokens of one chunk of the fused head: 1.6 GB of bf16 logits at 50,304 columns."""


def reach_tokens(model: ModelConfig, tokens: int, kind: WindowKind = "short") -> int:
    """How far before a chunk the widest window of the schedule can see, in whole blocks."""
    if kind not in model.windows:
        return tokens
    return min(tokens, round_up(model.windows[kind].widest_tokens, BLOCK_TOKENS))


def chunk_reach(model: ModelConfig, tokens: int, kind: WindowKind) -> int | None:
    """That of plain attention by chunks of queries; None: it takes all keys at once, under a dense mask."""
    reach = reach_tokens(model, tokens, kind)
    dense = tokens <= DENSE_LIMIT_TOKENS or tokens % BLOCK_TOKENS or reach + CHUNK_TOKENS >= tokens
    return None if dense else reach


def head_chunk_tokens(rows: int) -> int:
    """Tokens of one chunk of a head of so many rows."""
    return max(MIN_CHUNK_TOKENS, CHUNK_LOGITS // rows)


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    backend: str = "auto"
    """Computes attention: `reference`, `flex`, `ranges`, `varlen` or `fa3`; `auto` takes the fastest usable one with
    the preset's mask semantics. `paceline doctor` says which and why. `varlen` (FlashAttention 2, in PyTorch) and `fa3`
    (FlashAttention 3) know windows in tokens only and are taken only by name. `fa3` is the package
    flash_attn_interface, or the shared library that the environment names as PACELINE_FA3_LIBRARY, which registers
    `flash_attn_3.fwd` and `.bwd` with torch; what that links to must be found too (LD_LIBRARY_PATH)."""


@dataclass(frozen=True, kw_only=True)
class QkvConfig:
    backend: str = "auto"
    """Computes queries, keys and values, with value mix, norm and rotary: `reference`, or `fused`, the library's
    product and then one kernel for all the rest."""


@dataclass(frozen=True, kw_only=True)
class LmHeadConfig(Limited, prefix="--lm-head."):
    backend: str = "auto"
    """Computes output layer and loss: `reference`, `chunked`, which never holds the logits of all tokens, or `fused`,
    which makes the gradient in the forward pass; `auto` takes the fastest that works here."""
    chunk_tokens: Annotated[int | None, at_least(1).saying("None leaves it to the machine")] = None
    """Tokens whose logits exist at once, in `chunked` and `fused`; None: as many as are fast, fewer where memory is
    short. Only the last digits depend on it."""


@dataclass(frozen=True, kw_only=True)
class MlpConfig:
    backend: str = "auto"
    """`reference` or `fused`. Computes the MLPs; `fused` has the activation inside the products."""


@dataclass(frozen=True, kw_only=True)
class MatmulConfig:
    backend: str = "auto"
    """`reference`. Computes single products with a weight, where no fused kernel does."""
