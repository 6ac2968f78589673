"""How text is drawn, what a finished run is judged on, and what a server accepts. No torch."""

from dataclasses import dataclass, replace
from typing import Annotated

from paceline.core.errors import ConfigError
from paceline.settings.limits import NOT_NEGATIVE, POSITIVE, SHARE, Limit, Limited, at_least

TEMPERATURE = Limit("must be a number from 0 on; 0 is greedy", NOT_NEGATIVE.holds)
TOO_SMALL = Limit("is too small; leave it out for the default", POSITIVE.holds)


@dataclass(frozen=True, kw_only=True)
class SamplingConfig(Limited, prefix="--"):
    temperature: Annotated[float, TEMPERATURE] = 0.8
    """0 takes the likeliest token every time."""
    top_k: Annotated[int | None, at_least(1).saying("None lets all tokens in")] = 50
    """Only the k likeliest tokens may be drawn; None: all."""
    top_p: Annotated[float, SHARE.saying("1 lets all tokens in")] = 1.0
    """Only the likeliest tokens that together reach this probability may be drawn."""
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class SuiteConfig(Limited, prefix="--"):
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
    fewshot: Annotated[int | None, Limit("is negative; 0 gives no examples", NOT_NEGATIVE.holds)] = None
    """Examples before each question of a task; None: as the task says."""
    limit: Annotated[int | None, at_least(1).saying("None takes all questions")] = None
    """Only the first so many questions of HellaSwag and of each task."""
    sequence_tokens: Annotated[int | None, at_least(2)] = None
    """Most tokens the model is given at once, except in validation; None: as many as in training."""

    def check(self) -> None:
        if self.tasks_dir is not None and not self.tasks:
            raise ConfigError(f"--tasks-dir {self.tasks_dir}: say which of its tasks with --tasks")
        if not (self.validation or self.text or self.hellaswag or self.tasks):
            raise ConfigError("--no-validation leaves nothing to judge; add --text, --hellaswag or --tasks")


@dataclass(frozen=True, kw_only=True)
class ServeConfig(Limited, prefix="--"):
    max_streams: Annotated[int, TOO_SMALL] = 16
    """Texts written at the same time; each has a slot of the key/value cache, which is allocated at the start."""
    max_queue: Annotated[int, replace(TOO_SMALL, holds=NOT_NEGATIVE.holds)] = 64
    """Texts that may wait for a slot; one more is answered with status 429."""
    max_tokens: Annotated[int | None, TOO_SMALL] = None
    """Prompt and new tokens of one text at most; None: as many as the model has positions for."""
    max_body_bytes: Annotated[int, TOO_SMALL] = 1 << 20
    """Size of a request."""
    timeout_s: Annotated[float, TOO_SMALL] = 300.0
    """From a request's arrival to the end of its last text, waiting included."""
