"""Every preset at a sixteenth of its size trains on a CPU from the built-in text, and twice alike."""

from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest

from paceline.evaluate.validation import validation_batches
from paceline.recipes.presets import PRESETS
from paceline.recipes.scaling import scaled, with_steps
from paceline.settings.data import BatchConfig
from paceline.settings.run import RunConfig
from paceline.text.dataset import open_dataset
from train.tiny import losses, run

RECORDS = [name for name in PRESETS if name != "demo"]
SAMPLE = ("r18-softcap",)


def short(name: str, steps: int, *, tokens: int | None = None) -> RunConfig:
    """A sixteenth of the preset for a few steps, with less than its 2,048 tokens a step if so asked."""
    config = with_steps(scaled(PRESETS[name](), 1 / 16), steps)
    if tokens is not None:
        config = replace(config, batch=BatchConfig(tokens=tokens, sequence_tokens=tokens))
    one_sequence = replace(config.evaluate, every=None, tokens=config.batch.sequence_tokens)
    return replace(config, evaluate=one_sequence, train=replace(config.train, device="cpu"))


def train_twice(config: RunConfig, folder: Path) -> list[float]:
    """Losses of one run, after a second one has given the same."""
    cards = [run(config, folder / again).card for again in ("a", "b")]
    assert losses(folder / "a") == losses(folder / "b")
    assert cards[0].val_loss == cards[1].val_loss
    return [loss for loss in losses(folder / "a") if loss is not None]


@pytest.mark.usefixtures("builtin_text")
@pytest.mark.parametrize("name", RECORDS)
def test_the_built_in_text_holds_the_validation_of_a_sixteenth(name: str) -> None:
    config = scaled(PRESETS[name](), 1 / 16)
    val = open_dataset(config.data, config.model.vocab_size).val
    read = validation_batches(val, config.batch.sequence_tokens, config.evaluate.tokens, config.batch.micro_sequences)
    assert sum(batch.tokens.size for batch in read) == config.evaluate.tokens >= 16_384


@pytest.mark.usefixtures("builtin_text")
@pytest.mark.parametrize("name", SAMPLE)
def test_six_steps_of_a_preset_repeat_and_learn(name: str, tmp_path: Path) -> None:
    found = train_twice(short(name, 6, tokens=1024), tmp_path)
    assert len(found) == 6
    assert found[-1] < found[0] - 0.5


@pytest.mark.slow
@pytest.mark.usefixtures("builtin_text")
@pytest.mark.parametrize("name", RECORDS)
def test_fifty_steps_of_every_preset_repeat_and_learn(name: str, tmp_path: Path) -> None:
    found = train_twice(short(name, 50), tmp_path)
    assert len(found) == 50
    assert mean(found[-5:]) < mean(found[20:25]) < found[0] - 1.0
