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
    tensorboard: bool = False
    """Also write TensorBoard's event files, into the run's folder (needs `paceline[tb]`)."""
    wandb: str | None = None
    """Also log to this project of Weights & Biases (needs `paceline[wandb]`)."""
    trackio: str | None = None
    """Also log to this project of trackio (needs `paceline[trackio]`)."""

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ConfigError(f"--metrics.every {self.every} must be at least 1")
        for flag, project in (("wandb", self.wandb), ("trackio", self.trackio)):
            if project is not None and not project.strip():
                raise ConfigError(f"--metrics.{flag} {project!r} is no project's name; give one, or None for none")
