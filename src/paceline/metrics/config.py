"""What is recorded besides the run card. No torch."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class MetricsConfig:
    every: int = 1
    """Steps between two records of the training loss. Values stay on the device until a record is due."""
    instruments: bool = False
    """Also record gradient norm, update-to-weight ratio per class, largest logit and query-key product, and reserved
    memory. Nothing is computed for them when off."""
