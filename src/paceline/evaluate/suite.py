"""Everything that `paceline evaluate` was asked for, one after the other, each as the card keeps it."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from paceline.core.errors import ConfigError
from paceline.core.files import blake2b_of
from paceline.evaluate.config import SuiteConfig
from paceline.evaluate.hellaswag import Question, judge_hellaswag, read_hellaswag
from paceline.evaluate.load import LoadedRun
from paceline.evaluate.positions import LossByPlace, Rows, places_in_sequence
from paceline.evaluate.score import PASS_TOKENS, Progress
from paceline.evaluate.text import TextFile, judge_text, read_text
from paceline.evaluate.validation import validate, validation_batches, validation_spans
from paceline.kernels.head_loss import head_loss_chunked
from paceline.metrics.card import Evaluation
from paceline.model.loss import Losses
from paceline.model.masks import window_tensor
from paceline.text.dataset import check_made_with, open_dataset

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

Kind = Literal["validation", "text", "hellaswag", "task"]
Tell = Callable[[str], Progress]
"""What is judged now, and how its progress is shown."""


@dataclass(frozen=True)
class Suite:
    """What the user named, opened before the model is, so that a mistake costs no waiting."""

    config: SuiteConfig
    texts: tuple[TextFile, ...]
    questions: list[Question]
    tasks: "TaskManager | None"


def open_suite(config: SuiteConfig) -> Suite:
    texts = tuple(read_text(Path(path)) for path in config.text)
    questions = [] if config.hellaswag is None else read_hellaswag(Path(config.hellaswag), config.limit)
    tasks = None
    if config.tasks:
        from paceline.evaluate.harness import open_tasks

        tasks = open_tasks(config.tasks, None if config.tasks_dir is None else Path(config.tasks_dir))
    return Suite(config, texts, questions, tasks)


def evaluations(run: LoadedRun, suite: Suite, tell: Tell) -> Iterator[Evaluation]:
    most_tokens = _most_tokens(run, suite.config)
    if suite.config.validation:
        yield _validation(run, tell("validation"))
    for file in suite.texts:
        yield _text(run, file, most_tokens, tell(file.path.name))
    if suite.questions:
        yield _hellaswag(run, suite, most_tokens, tell("HellaSwag"))
    if suite.tasks is not None:
        from paceline.evaluate.harness import judge_tasks

        progress = tell(", ".join(suite.config.tasks))
        for found in judge_tasks(run, suite.tasks, suite.config, most_tokens=most_tokens, progress=progress):
            yield _evaluation(run, "task", found.name, found.figures, {**found.of, "sequence_tokens": most_tokens})


def _most_tokens(run: LoadedRun, config: SuiteConfig) -> int:
    limit = run.config.model.rotary.max_tokens
    if config.sequence_tokens is not None and config.sequence_tokens > limit:
        raise ConfigError(f"--sequence-tokens {config.sequence_tokens:,}: the model has positions for {limit:,} only")
    return config.sequence_tokens or run.config.batch.sequence_tokens


def _validation(run: LoadedRun, progress: Progress) -> Evaluation:
    """As in training: the same tokens in the same sequences, hence the same loss; and by place in the document."""
    config, length = run.config, run.config.batch.sequence_tokens
    corpus = open_dataset(config.data, config.model.vocab_size).val
    check_made_with((run.tokenizer.name, run.tokenizer.fingerprint), f"{run.folder.path}: its tokenizer", corpus.shards)
    device = run.model.embeddings.token.device
    model = copy.copy(run.model)  # the same weights under another head:
    model.loss = head_loss_chunked  # logits of a whole sequence of a record take gigabytes
    by_place = LossByPlace(length, max(run.windows, default=None), device)
    total = len(validation_spans(corpus, length, config.evaluate.tokens))
    done = 0

    def forward(tokens: Tensor, targets: Tensor, windows: Tensor) -> Losses:
        nonlocal done
        losses: Losses = model(tokens, targets, windows)
        by_place.add(losses.main, places_in_sequence(tokens, config.data.end_of_text))
        done += len(tokens)
        progress(done, total)
        return losses

    batches = validation_batches(corpus, length, config.evaluate.tokens, max(1, PASS_TOKENS // length))
    windows, token_bytes = window_tensor(run.windows, device), run.tokenizer.token_byte_lengths()
    found = validate(forward, batches, windows, token_bytes, device=device)
    assert found is not None  # nobody asked it to give up
    figures = {"loss": found.loss, "bits_per_byte": found.bits_per_byte}
    of = {"tokens": found.tokens, "sequence_tokens": length, "data_fingerprint": corpus.fingerprint}
    return _evaluation(run, "validation", Path(config.data.dir).name, figures, of, by_place.rows())


def _text(run: LoadedRun, file: TextFile, most_tokens: int, progress: Progress) -> Evaluation:
    found = judge_text(run.model, run.tokenizer, file, windows=run.windows, most_tokens=most_tokens, progress=progress)
    figures = {"loss": found.loss, "bits_per_byte": found.bits_per_byte}
    of = {"tokens": found.tokens, "bytes": file.bytes, "blake2b": file.blake2b, "sequence_tokens": most_tokens}
    return _evaluation(run, "text", file.path.name, figures, of, found.positions)


def _hellaswag(run: LoadedRun, suite: Suite, most_tokens: int, progress: Progress) -> Evaluation:
    figures = judge_hellaswag(
        run.model, run.tokenizer, suite.questions, windows=run.windows, most_tokens=most_tokens, progress=progress
    )
    path = Path(str(suite.config.hellaswag))
    of = {"examples": len(suite.questions), "blake2b": blake2b_of(path), "sequence_tokens": most_tokens}
    return _evaluation(run, "hellaswag", path.name, figures, of)


def _evaluation(
    run: LoadedRun, kind: Kind, name: str, figures: dict[str, Any], of: dict[str, Any], positions: Rows = ()
) -> Evaluation:
    made, of = datetime.now(UTC).isoformat(timespec="seconds"), {**of, "window_tokens": max(run.windows, default=None)}
    return Evaluation(kind=kind, name=name, step=run.step, made=made, figures=figures, of=of, positions=positions)
