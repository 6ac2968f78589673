"""How text is drawn, what a finished run is judged on, and what a server accepts. No torch."""

import math
from dataclasses import dataclass

from paceline.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    temperature: float = 0.8
    """0 takes the likeliest token every time."""
    top_k: int | None = 50
    """Only the k likeliest tokens may be drawn; None: all."""
    top_p: float = 1.0
    """Only the likeliest tokens that together reach this probability may be drawn."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ConfigError(f"--temperature {self.temperature} must be a number from 0 on; 0 is greedy")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"--top-k {self.top_k} must be at least 1; None lets all tokens in")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"--top-p {self.top_p} is outside (0, 1]; 1 lets all tokens in")


@dataclass(frozen=True, kw_only=True)
class SuiteConfig:
    """What a trained run is judged on (`paceline evaluate`)."""

    validation: bool = True
    """The run's own validation data, as in training."""
    text: tuple[str, ...] = ()
    """Text files (UTF-8), each one document: bits per byte, and loss by place in it."""
    hellaswag: str | None = None
    """HellaSwag's file of questions with answers, such as hellaswag_val.jsonl."""
    tasks: tuple[str, ...] = ()
    """Tasks of lm-evaluation-harness by name; needs paceline[eval]."""
    tasks_dir: str | None = None
    """Folder with task files (.yaml) of your own; --tasks then names those, and no others."""
    fewshot: int | None = None
    """Examples before each question of a task; None: as the task says."""
    limit: int | None = None
    """Only the first so many questions of HellaSwag and of each task."""
    sequence_tokens: int | None = None
    """Most tokens the model is given at once, except in validation; None: as many as in training."""

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"--limit {self.limit} must be at least 1; None takes all questions")
        if self.fewshot is not None and self.fewshot < 0:
            raise ConfigError(f"--fewshot {self.fewshot} is negative; 0 gives no examples")
        if self.sequence_tokens is not None and self.sequence_tokens < 2:
            raise ConfigError(f"--sequence-tokens {self.sequence_tokens} must be at least 2")
        if self.tasks_dir is not None and not self.tasks:
            raise ConfigError(f"--tasks-dir {self.tasks_dir}: say which of its tasks with --tasks")
        if not (self.validation or self.text or self.hellaswag or self.tasks):
            raise ConfigError("--no-validation leaves nothing to judge; add --text, --hellaswag or --tasks")


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
