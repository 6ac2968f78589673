"""What a server accepts. No torch."""

from dataclasses import dataclass

from paceline.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    max_streams: int = 16
    """Texts written at the same time; each has a slot of the key/value cache, which is allocated at the start."""
    max_queue: int = 64
    """Texts that may wait for a slot; one more is answered with status 429."""
    max_tokens: int | None = None
    """Prompt and new tokens of one text at most; None: as many as the model has positions for."""
    max_body_bytes: int = 1 << 20
    """Size of a request."""
    timeout_s: float = 300.0
    """From a request's arrival to the end of its last text, waiting included."""

    def __post_init__(self) -> None:
        for name in ("max_streams", "max_queue", "max_tokens", "max_body_bytes", "timeout_s"):
            value = getattr(self, name)
            if value is not None and not value > (-1 if name == "max_queue" else 0):
                raise ConfigError(f"--{name.replace('_', '-')} {value} is too small; leave it out for the default")
