"""Which fast path is used where. No torch."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    backend: Literal["auto", "reference", "flex", "ranges"] = "auto"
    """Who computes attention; `auto` takes the fastest usable one with the preset's mask semantics. `paceline doctor`
    says which and why."""
    heads: Literal["auto", "reference", "fused"] = "auto"
    """Who makes the heads: projections, value mix, norm, rotary. `fused` is one product and one kernel."""


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    backend: Literal["auto", "reference", "chunked", "fused"] = "auto"
    """Who computes head and loss. `chunked` never holds the logits of all tokens, nor does `fused`, which makes the
    gradient in the forward pass; `auto` takes the fastest that works here."""


@dataclass(frozen=True, kw_only=True)
class MlpConfig:
    backend: Literal["auto", "reference", "fused"] = "auto"
    """Who computes the MLPs; `fused` has the activation inside the products."""
