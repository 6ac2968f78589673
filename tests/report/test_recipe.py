"""The line that says what a run is: what was asked for, no more."""

from dataclasses import replace
from pathlib import Path

import pytest

from paceline.commands.train import base_config, parse_arguments
from paceline.metrics.card import RunCard, card_diff, read_card
from paceline.recipes.presets import preset
from paceline.report.recipe import recipe
from report.runs_on_disk import write_run


def card_of(line: str, folder: Path) -> RunCard:
    """The card of the run that `paceline train` with these words would start."""
    words = line.split()
    config = parse_arguments(words, base_config(words)).config
    diff = card_diff(preset(words[0]), config)
    card = read_card(write_run(folder, steps=20))
    return replace(card, preset=words[0], steps=config.steps, seed=config.seed, track=config.track, diff=diff)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("demo", "preset demo, seed 0"),
        ("demo --steps 60 --optim.matrices adamw", "preset demo, seed 0, steps 60, optim.matrices adamw"),
        ("demo --seed 2 --steps 310", "preset demo, seed 2"),
        ("r04-muon --scale 1/16", "preset r04-muon, scale 1/16, seed 0"),
        ("r18-softcap --scale 0.5 --steps 60", "preset r18-softcap, scale 1/2, seed 0, steps 60"),
        ("demo --scale 1/16", "preset demo, scale 1/16, seed 0"),
        (
            "demo --scale 1/16 --steps 60",  # many scales make such a model
            "preset demo, seed 0, steps 60, model.vocab_size 512, model.width 24, model.head_dim 8, "
            "data.tokenizer bpe-512 and 3 more",
        ),
    ],
)
def test_a_run_is_told_by_what_was_asked_for(line: str, told: str, tmp_path: Path) -> None:
    assert recipe(card_of(line, tmp_path)) == told


def test_a_preset_of_another_version_is_told_by_its_diff(tmp_path: Path) -> None:
    card = replace(card_of("demo --steps 60", tmp_path), preset="gone")
    assert recipe(card) == "preset gone, seed 0, steps 60"
