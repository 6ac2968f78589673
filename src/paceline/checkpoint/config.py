"""When the state of a run is saved. No torch."""

from dataclasses import dataclass

from paceline.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    every: int | None = None
    """Steps between two checkpoints; None: only at the end. They are written beside the training."""
    keep: int = 2
    """How many of the newest are kept; two at least, since one may turn out to be damaged."""

    def __post_init__(self) -> None:
        if self.every is not None and self.every < 1:
            raise ConfigError(f"--checkpoint.every {self.every} must be at least 1; None saves only at the end")
        if self.keep < 2:
            raise ConfigError(
                f"--checkpoint.keep {self.keep} must be at least 2, or a run with a damaged file could not be continued"
            )
