"""`paceline schedule`: the settings of the steps by stage."""

import json
from dataclasses import replace

import pytest

from paceline.cli import main
from paceline.recipes.presets import PRESETS, preset
from paceline.settings.model import LossTerm
from paceline.settings.schedule import Stage


@pytest.fixture
def staged(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo with a loss term whose weight and batch change in the middle."""
    demo = preset("demo")
    model = replace(demo.model, loss_terms=(LossTerm(name="z_loss", weight=0.002),))
    stages = (Stage(share=0.5, batch_tokens=1024), Stage(share=0.5, loss_weights=(0.25,)))
    config = replace(demo, steps=100, model=model, stages=stages)
    monkeypatch.setitem(PRESETS, "demo", lambda: config)


@pytest.mark.usefixtures("staged")
def test_weights_of_loss_terms_stand_beside_the_rates(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["schedule", "demo"]) == 0
    heading, first, *_ = (line.split() for line in capsys.readouterr().out.splitlines())
    assert (heading[-2:], first[-1]) == (["z_loss", "weight"], "0.002")
    assert main(["schedule", "demo", "--json"]) == 0
    stretches = json.loads(capsys.readouterr().out)
    assert {row["stage"]: (row["tokens_per_step"], row["loss_weights"]) for row in stretches} == {
        1: (1024, [0.002]),
        2: (2048, [0.0005]),
    }


def test_a_run_without_terms_has_no_column_for_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["schedule", "demo"]) == 0
    assert capsys.readouterr().out.splitlines()[0].split()[-1] == "momentum"
