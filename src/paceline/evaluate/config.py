"""When and on what the model is judged. No torch."""

from dataclasses import dataclass

from paceline.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    every: int | None = 125
    """Steps between two validations, the first before step 0; None: only at the end. One always follows the last
    step."""
    tokens: int = 10_485_760
    """Tokens from the start of the validation data, rounded down to whole sequences; 0: all of them."""

    def __post_init__(self) -> None:
        if self.every is not None and self.every < 1:
            raise ConfigError(f"--evaluate.every {self.every} must be at least 1; None validates only at the end")
        if self.tokens < 0:
            raise ConfigError(f"--evaluate.tokens {self.tokens} is negative; 0 means all of the validation data")
