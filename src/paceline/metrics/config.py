"""What is recorded besides the run card. No torch."""

from dataclasses import dataclass

from paceline.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class MetricsConfig:
    every: int = 1
    """Steps between two records of the training loss. Values stay on the device until a record is due."""
    instruments: bool = False
    """Also record gradient norm, update-to-weight ratio per class, largest logit and query-key product, and reserved
    memory. Nothing is computed for them when off."""

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ConfigError(f"--metrics.every {self.every} must be at least 1")
