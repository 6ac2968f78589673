"""Which fast path is used where. No torch."""

from dataclasses import dataclass
from typing import Literal

from paceline.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    backend: Literal["auto", "reference", "flex", "ranges", "varlen", "fa3"] = "auto"
    """Who computes attention; `auto` takes the fastest usable one with the preset's mask semantics. `paceline doctor`
    says which and why. `varlen` (FlashAttention 2, in PyTorch) and `fa3` (FlashAttention 3) know windows in tokens only
    and are taken only by name."""
    fa3_library: str | None = None
    """Shared library that registers `flash_attn_3.fwd` and `.bwd` with torch; None: the package flash_attn_interface.
    What it links to must be found too (LD_LIBRARY_PATH)."""
    heads: Literal["auto", "reference", "fused"] = "auto"
    """Who makes the heads: projections, value mix, norm, rotary. `fused` is the library's product, then one kernel
    for all the rest."""

    def __post_init__(self) -> None:
        if self.fa3_library is not None and self.backend != "fa3":
            raise ConfigError(
                f"--attention.fa3-library {self.fa3_library} is of use to --attention.backend fa3 only, not "
                f"{self.backend}; set both or neither"
            )


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    backend: Literal["auto", "reference", "chunked", "fused"] = "auto"
    """Who computes head and loss. `chunked` never holds the logits of all tokens, nor does `fused`, which makes the
    gradient in the forward pass; `auto` takes the fastest that works here."""
    chunk_tokens: int | None = None
    """Tokens whose logits exist at once, in `chunked` and `fused`; None: as many as are fast, fewer where memory is
    short. Only the last digits depend on it."""

    def __post_init__(self) -> None:
        if self.chunk_tokens is not None and self.chunk_tokens < 1:
            raise ConfigError(
                f"--head.chunk-tokens {self.chunk_tokens} must be at least 1; None leaves it to the machine"
            )
        if self.chunk_tokens is not None and self.backend == "reference":
            raise ConfigError(
                f"--head.chunk-tokens {self.chunk_tokens} is of no use to --head.backend reference, which holds all "
                f"logits; use chunked"
            )


@dataclass(frozen=True, kw_only=True)
class MlpConfig:
    backend: Literal["auto", "reference", "fused"] = "auto"
    """Who computes the MLPs; `fused` has the activation inside the products."""
