"""Bad numbers: the step is skipped without a trace, counted, and a row of them ends the run with a report."""

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from model.small import windows
from paceline.checkpoint import store
from paceline.checkpoint.run_folder import RunFolder
from paceline.core.errors import PacelineError
from paceline.data.batches import Cursor, position_after_steps, spans_at
from paceline.data.corpus import Corpus
from paceline.metrics.card import read_card
from paceline.model.gpt import GPT
from paceline.parallel.embedding_sync import EmbeddingSync
from paceline.parallel.ranks import SINGLE_PROCESS
from paceline.settings import schedule
from paceline.settings.run import BadStepsConfig, RunConfig
from paceline.text.dataset import open_dataset
from paceline.train import bad_step_report, gradient_step
from paceline.train.bad_step_report import first_not_finite, reason
from paceline.train.bad_steps import LEARNING_STEPS, BadSteps
from paceline.train.gradient_step import accumulate_gradient
from paceline.train.run import Options, resume_run
from train.tiny import losses, run, tiny_config, weights

Spoil = Callable[[GPT, Tensor], Tensor]


def spoil_loss(_: GPT, loss: Tensor) -> Tensor:
    return loss * math.nan


def spoil_gradient(model: GPT, loss: Tensor) -> Tensor:
    gradient = model.get_parameter("blocks.1.mlp.down").grad
    assert gradient is not None
    gradient[0, 0] = math.inf
    return loss


@contextmanager
def spoilt(at: set[int], how: Spoil) -> Iterator[None]:
    """Steps with these numbers, counted over the block, come out wrong."""
    calls = iter(range(10**6))

    def gradient(model: Any, *given: Any, **options: Any) -> Tensor:
        loss = accumulate_gradient(model, *given, **options)
        return how(model, loss) if next(calls) in at else loss

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(gradient_step, "accumulate_gradient", gradient)
        yield


def short(folder: Path, **changes: Any) -> RunConfig:
    config = tiny_config(folder, steps=6)
    rare = {"evaluate": replace(config.evaluate, every=None), "checkpoint": replace(config.checkpoint, every=None)}
    return replace(config, **{**rare, **changes})


@pytest.mark.parametrize("how", [spoil_loss, spoil_gradient])
def test_a_step_with_bad_numbers_is_skipped_counted_and_named(
    how: Spoil, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = short(tmp_path / "data")
    with spoilt({2}, how):
        done = run(replace(config, train=replace(config.train, stop_after=3)), tmp_path / "run")
    run(replace(config, train=replace(config.train, stop_after=2)), tmp_path / "before")
    spoiled, before = (store.load(RunFolder(tmp_path / n).checkpoints()[-1]) for n in ("run", "before"))
    for group in ("model", "optimizer"):
        one, other = spoiled.groups[group], before.groups[group]
        assert all(torch.equal(one[name], other[name]) for name in other), "as if the third step had not been"
    assert (done.card.steps_done, done.card.skipped_steps) == (3, 1)
    culprit = "the loss" if how is spoil_loss else "the gradient of blocks.1.mlp.down"
    assert f"step 3 skipped: {culprit} is not finite (1 skipped in all)" in capsys.readouterr().out
    with spoilt({2}, how):
        whole = run(config, tmp_path / "whole").card
    resume_run(config, RunFolder(tmp_path / "run"))
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert read_card(tmp_path / "run").skipped_steps == whole.skipped_steps == 1


def test_a_healthy_run_has_the_bits_of_one_that_skips_nothing(tmp_path: Path) -> None:
    for name, settings in (
        ("on", BadStepsConfig()),
        ("spike", BadStepsConfig(spike=6.0)),
        ("off", BadStepsConfig(skip=False)),
    ):
        run(short(tmp_path / "data", bad_steps=settings), tmp_path / name)
    for name in ("on", "spike"):
        assert losses(tmp_path / name) == losses(tmp_path / "off")
        one, other = weights(tmp_path / name), weights(tmp_path / "off")
        assert all(torch.equal(one[key], other[key]) for key in one)


def test_a_row_of_bad_steps_ends_the_run_and_says_where(tmp_path: Path) -> None:
    """A sequence that overflows: the run stops with its weights as they were, and goes on behind the bad data."""
    config = short(tmp_path / "data", bad_steps=BadStepsConfig(limit=2))
    with spoilt({3, 4, 5}, spoil_gradient), pytest.raises(PacelineError) as caught:
        run(config, tmp_path / "run")
    line = str(caught.value)
    assert "stopped after 2 skipped steps in a row; at step 5 the gradient of blocks.1.mlp.down is not finite" in line
    shard, start = spans_of(config, 4)[0].tolist()
    assert shard == 0
    assert f"x_train_000001.bin tokens {start:,} to {start + 256:,}" in line
    assert f"--resume {tmp_path / 'run'}" in line
    card = read_card(tmp_path / "run")
    assert (card.finished, card.steps_done, card.skipped_steps) == (False, 5, 2)
    assert "stopped after 2 skipped steps" in card.notes[-1]
    done = resume_run(config, RunFolder(tmp_path / "run"))
    assert done.card.finished


def test_the_bad_batch_is_looked_at_in_its_own_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop learns of it a step later, when the window may have grown."""
    looked_at = []
    monkeypatch.setattr(schedule, "windows_at", lambda _, step: {"short": 128 * (step + 1)})
    monkeypatch.setattr(bad_step_report, "_search", lambda loop, _: looked_at.append(int(loop.gradient.windows)))
    with spoilt({3, 4, 5}, spoil_gradient), pytest.raises(PacelineError, match="at step 5 "):
        run(short(tmp_path / "data", bad_steps=BadStepsConfig(limit=2)), tmp_path / "run")
    assert looked_at == [128 * 5]


def open_train(config: RunConfig) -> Corpus:
    return open_dataset(config.data, config.model.vocab_size).train


def spans_of(config: RunConfig, step: int) -> np.ndarray:
    """Where the batch of a step lies in the data, in a run without a rewind."""
    corpus, batch = open_train(config), config.batch
    start = Cursor(position_after_steps(corpus, config.data, batch, step))
    return spans_at(corpus, config.data, batch, start, batch.sequences, seed=config.seed)


def test_the_forward_pass_is_searched_for_the_first_tensor_that_is_wrong(tmp_path: Path) -> None:
    model = run(short(tmp_path / "data", steps=1), tmp_path / "run").run.model
    tokens = torch.full((1, 256), 65, dtype=torch.int32)
    given = tokens, tokens.long(), windows(128)
    assert first_not_finite(model, *given) is None
    with torch.no_grad():
        model.get_parameter("blocks.1.mlp.up").mul_(1e30)
    assert first_not_finite(model, *given) == "the output of blocks.1.mlp"
    with torch.no_grad():
        model.embeddings.token[200] = math.nan
    assert first_not_finite(model, *given) == "the weight embeddings.token"


def test_of_a_batch_only_the_sequence_that_is_wrong_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The third of four."""
    config = short(tmp_path / "data", bad_steps=BadStepsConfig(limit=2))
    place = spans_of(config, 1)[2:3]
    wrong = torch.from_numpy(open_train(config).take(place, 256).tokens)

    def look(_: GPT, tokens: Tensor, *given: Tensor) -> str | None:
        return "the loss" if (tokens == wrong).all(dim=1).any() else None

    monkeypatch.setattr(bad_step_report, "first_not_finite", look)
    with spoilt({0, 1, 2}, spoil_loss), pytest.raises(PacelineError, match="at step 2 the loss is") as caught:
        run(config, tmp_path / "run")
    start = int(place[0, 1])
    named = f"first wrong in the forward pass: the loss; data: x_train_000001.bin tokens {start:,} to {start + 256:,};"
    assert named in str(caught.value)


def test_a_rewind_goes_back_and_leaves_the_data_out(tmp_path: Path) -> None:
    """Steps 4 and 5 are bad; from the checkpoint of step 2 on, the run reads what comes after them."""
    config = short(tmp_path / "data", bad_steps=BadStepsConfig(limit=2))
    config = replace(config, checkpoint=replace(config.checkpoint, every=2))
    folder = RunFolder(tmp_path / "run")
    with spoilt({3, 4}, spoil_gradient), pytest.raises(PacelineError):
        run(config, folder.path)
    assert [path.name for path in folder.checkpoints()] == ["step_000004", "step_000005"]
    seen: list[Tensor] = []

    def note(model: Any, batch: Any, *given: Any, **options: Any) -> Tensor:
        seen.append(batch.tokens.clone())
        return accumulate_gradient(model, batch, *given, **options)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(gradient_step, "accumulate_gradient", note)
        cut = replace(config, train=replace(config.train, stop_after=1))
        resume_run(cut, folder, options=Options(rewind=4))
        assert [path.name for path in folder.checkpoints()] == ["step_000004", "step_000005"]
        done = resume_run(config, folder)  # the next launch knows of it
    assert done.card.finished
    assert [len(losses(folder.path)), len(seen)] == [6, 2]
    corpus = open_train(config)
    for step, tokens in zip((5, 6), seen, strict=True):
        assert torch.equal(tokens, torch.from_numpy(corpus.take(spans_of(config, step), 256).tokens))
    assert "rewound; data go on at token 5,120, after all that was read before" in done.card.notes


# ---- the judge by itself


def judge(**config: Any) -> tuple[BadSteps, torch.nn.Parameter]:
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    sync = EmbeddingSync([], SINGLE_PROCESS, sharded=False)
    return BadSteps(BadStepsConfig(**config), {"w": parameter}, sync, SINGLE_PROCESS), parameter


def test_a_spike_is_a_loss_far_above_those_before() -> None:
    subject, _ = judge(spike=6.0)
    noise = torch.randn(400, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 0.1
    falling = [(4.0 - step / 400 + float(noise[step])) for step in range(400)]
    for step, loss in enumerate(falling):
        spike = step in (10, 200, 201)
        _, skip = subject.judge(step, torch.tensor([loss + (2.0 if spike else 0.0)]))
        assert bool(skip) is (spike and step >= LEARNING_STEPS), step
    subject.wait()
    assert (subject.skipped, subject.last_step) == (2, 201)
    assert reason(subject).startswith("a loss of 5.")


def test_the_reason_of_a_spike_has_the_loss_and_what_was_usual() -> None:
    subject, _ = judge(spike=6.0)
    noise = torch.randn(400, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 0.1
    for step, off in enumerate(noise.tolist()):
        subject.judge(step, torch.tensor([3.0 + off]))
    subject.judge(400, torch.tensor([5.25]))
    subject.wait()
    found = re.fullmatch(r"a loss of (.+) after (.+) with a standard deviation of (.+)", reason(subject))
    assert found is not None
    assert found[1] == "5.2500"
    assert float(found[2]) == pytest.approx(3.0, abs=0.04)
    assert float(found[3]) == pytest.approx(0.1, rel=0.3)


def test_its_memory_survives_a_checkpoint() -> None:
    whole, _ = judge(spike=6.0)
    cut, _ = judge(spike=6.0)
    for step in range(80):
        whole.judge(step, torch.tensor([3.0 + 0.1 * (step % 3)]))
        cut.judge(step, torch.tensor([3.0 + 0.1 * (step % 3)]))
        if step == 40:
            resumed, _ = judge(spike=6.0)
            resumed.load(cut.state())
            cut = resumed
    assert torch.equal(whole.state()["state"], cut.state()["state"])


def test_a_late_copy_is_told_once_and_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device that is behind: what arrived while the next step was judged is news all the same."""
    arrived: set[int] = set()
    numbers = iter(range(100))

    def copy(values: Tensor) -> tuple[Tensor, Callable[[], bool]]:
        number = next(numbers)
        return values.clone(), lambda: number in arrived

    monkeypatch.setattr("paceline.train.bad_steps.copy_to_host", copy)
    subject, parameter = judge()
    assert parameter.grad is not None
    for step in range(4):
        parameter.grad[0] = math.nan if step == 0 else 1.0
        subject.judge(step, torch.tensor([1.0]))
        if step == 1:
            assert subject.news() is None
            arrived.add(0)
    assert subject.news() == "step 1 skipped: the gradient of w is not finite (1 skipped in all)"
    assert subject.news() is None


def test_good_steps_end_a_row() -> None:
    subject, parameter = judge(limit=3)
    assert parameter.grad is not None
    for step, bad in enumerate([True, True, False, True, True, True]):
        parameter.grad[0] = math.nan if bad else 1.0
        assert not subject.exhausted
        assert bool(subject.judge(step, torch.tensor([1.0]))[1]) is bad
        subject.news()
    assert subject.exhausted
    assert subject.skipped == 5
    fresh, _ = judge(limit=3)
    fresh.load(subject.state())
    assert not fresh.exhausted
