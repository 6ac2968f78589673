"""Which back end computes what; `backends/` lists them. No torch."""

from dataclasses import dataclass
from typing import Annotated

from paceline.settings.limits import Limited, at_least


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
