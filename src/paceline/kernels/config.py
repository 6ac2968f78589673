"""Which fast path is used where. No torch."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    backend: Literal["auto", "reference", "flex"] = "auto"
    """Who computes attention; `auto` takes the fastest usable one with the preset's mask semantics. `paceline doctor`
    says which and why."""
