"""Which fast path is used where. No torch."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    backend: Literal["auto", "reference", "flex"] = "auto"
    """Who computes attention; `auto` takes the fastest usable one with the preset's mask semantics. `paceline doctor`
    says which and why."""


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    backend: Literal["auto", "reference", "chunked"] = "auto"
    """Who computes head and loss. `chunked` never holds the logits of all tokens; `auto` takes it wherever the compiler
    does not fuse the reference."""
