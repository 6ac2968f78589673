"""`settings/idle.py` says when a setting matters. Here every setting goes through three runs of a model in which no
technique is on: what the table calls idle leaves every bit alone, and what it does not name changes some."""

import dataclasses
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lab.cards_on_disk import write_run
from paceline.analysis.groups import groups_of
from paceline.analysis.runs import read_run, settings_of
from paceline.cli import main
from paceline.commands.train import base_config, parse_arguments, without_effect
from paceline.core.schema import flatten
from paceline.lab.technique import with_values
from paceline.recipes.presets import preset
from paceline.settings.idle import MATTERS, why_idle
from paceline.settings.model import ModelConfig
from paceline.settings.run import RunConfig
from train.test_every_setting import ROWS, Row, trained_alike
from train.tiny import losses, run, tiny_config, weights

OTHER = {
    "model.vocab_size": Row(300),
    "model.width": Row(32, also={"model.head_dim": 16}),
    "model.num_layers": Row(2),
    "model.num_heads": Row(4, also={"model.head_dim": 4}),
    "model.num_kv_heads": Row(1),
    "model.head_dim": Row(16, also={"model.num_heads": 1}),
    "model.zero_init_outputs": Row(True),
    "model.qk_norm": Row("before_rotary"),
    "model.rotary.spacing": Row("closed"),
    "model.tied_lm_head": Row(False),
    "model.embedding_norm": Row(True),
    "model.x0_mix": Row(True),
    "model.unet_skips": Row(True, also={"model.num_layers": 2}),
    "model.value_path": Row("layerwise"),
    "model.value_storage": Row("chunks"),
    "model.value_layers": Row((0,), also={"model.value_path": "listed"}),
    "model.value_gates": Row(True, also={"model.value_path": "layerwise"}),
    "model.skip": Row((0, 1), also={"model.num_layers": 2}),
    "model.backout_layer": Row(0),
    "model.layers_without_attention": Row((0,)),
    "model.softcap": Row(1.0),
    "model.softcap_shift": Row(0.5, also={"model.softcap": 1.0}),
    "model.document_mask": Row(True),
    "model.window.unit": Row("tokens"),
    "model.rotary.base": Row(500.0),
    "model.rotary.rotary_fraction": Row(0.5),
    "model.precision.embeddings": Row("bf16"),
    "model.lm_head_init": Row("zeros"),
    "model.lm_head_multiple": Row(2, "the same up to rounding", also={"model.embedding_multiple": 2}),
    "model.window.quantum_tokens": Row(64),
    "model.loss_terms": Row(({"name": "z_loss", "weight": 0.01},)),
    "optim.matrices": Row("muon"),
    "optim.groups": Row(({"name": "matrices", "beta1": 0.5},)),
    "optim.schedule.cooldown_steps": Row(1, also={"optim.schedule.cooldown_share": None}),
    "optim.schedule.cooldown_share": Row(0.5),
    "optim.average.tau_share": Row(0.9, also={"optim.average.start_share": 0.0}),
    "optim.average.tau_steps": Row(2.0, also={"optim.average.start_share": 0.0}),
}
"""Where the row of the other test is what the plain model has already, or cannot be."""
ALONE = {
    "model.embedding_multiple": "a head that is tied needs as many rows",
    "model.long_window": "refused without windows; see below",
}


def plain_config(folder: Path) -> RunConfig:
    config = tiny_config(folder, steps=3)
    model = ModelConfig(vocab_size=257, width=16, num_layers=1, num_heads=2, head_dim=8, tied_lm_head=True)
    return with_values(
        replace(
            config,
            model=replace(model, rotary=replace(model.rotary, max_tokens=1024)),
            evaluate=replace(config.evaluate, every=None, tokens=256),
            checkpoint=replace(config.checkpoint, every=None),
            train=replace(config.train, threads=1),
        ),
        {"optim.matrices": "adamw", "batch.sequence_tokens": 256, "batch.tokens": 512, "batch.micro_tokens": None},
    )


Trained = Callable[[dict[str, Any]], tuple[list[float | None], dict[str, Any]]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder, seen = tmp_path_factory.mktemp("plain"), dict[str, Any]()

    def result(values: dict[str, Any]) -> Any:
        if (key := repr(values)) not in seen:
            out = folder / str(len(seen))
            card = run(with_values(plain_config(folder / "data"), values), out).card
            seen[key] = [*losses(out), card.val_loss], weights(out)
        return seen[key]

    return result


@pytest.mark.parametrize("name", [name for name in ROWS if name not in ALONE])
def test_an_idle_setting_changes_no_bit_and_every_other_some(name: str, trained: Trained, tmp_path: Path) -> None:
    row, base = OTHER.get(name, ROWS[name]), plain_config(tmp_path)
    before, values = settings_of(base), {**row.also, name: row.value}
    idle = why_idle(name, before)
    if idle is None and row.effect != "another run":
        return
    after = with_values(base, values)
    one, other = trained({}), trained(values)
    assert (one[0] == other[0] and trained_alike(one, other)) == (idle is not None), f"{name} {row.value}: {idle}"
    assert dict(flatten(after))[name] != dict(flatten(base))[name]


def test_the_table_names_settings_only() -> None:
    names = settings_of(preset("demo")).keys() | {"model.long_window"}
    for entry in MATTERS:
        assert any(name.startswith(entry) for name in names), entry


def test_a_second_window_that_no_layer_attends_through_is_idle() -> None:
    second = {"unit": "blocks", "start_tokens": 128, "growth_tokens": 0}
    unused = with_values(preset("demo"), {"model.long_window": second})
    used = with_values(unused, {"model.layer_overrides": [{"layers": [0], "window": "long"}]})
    for name in ("model.long_window", "model.long_window.start_tokens"):
        assert why_idle(name, settings_of(unused)) is not None
        assert why_idle(name, settings_of(used)) is None


def test_a_rule_of_ones_own_may_read_muons_settings() -> None:
    own = settings_of(preset("demo")) | {"optim.matrices": "normuon"}
    assert why_idle("optim.muon.ns_steps", own) is None
    assert why_idle("optim.adam.matrix_lr", own) is None


def test_a_config_that_is_only_half_understood_has_no_idle_setting() -> None:
    assert why_idle("optim.muon.lr", {"optim.matrices": "adamw"}) is None
    assert why_idle("optim.muon.lr", {"optim.matrices": "adamw", "optim.groups": 3}) is None


def test_equal_runs_with_other_idle_settings_are_one_group(tmp_path: Path) -> None:
    base = read_run(write_run(tmp_path / "base", seed=0, loss=3.0))
    adamw = {**base.config, "optim.matrices": "adamw"}
    for name, value in {"optim.muon.lr": 0.7, "optim.adam.matrix_lr": 0.7}.items():
        configs = (adamw, {**adamw, name: value})
        runs = [dataclasses.replace(base, label=str(n), config=config) for n, config in enumerate(configs)]
        assert len(groups_of(runs)) == (1 if name == "optim.muon.lr" else 2), name


def given(*words: str) -> list[str]:
    base = base_config(["demo", *words])
    return without_effect(base, parse_arguments(["demo", *words], base))


@pytest.mark.parametrize(
    ("switched_off", "setting"),
    [
        ("--bad-steps.no-skip", "--bad-steps.limit 7"),
        ("--train.no-compile", "--train.coordinate-descent"),
        ("--train.no-compile", "--train.skip-guards"),
        ("--parallel.fsdp", "--parallel.zero1"),
        ("--parallel.fsdp", "--parallel.no-bucket-views"),
    ],
)
def test_a_setting_of_what_is_switched_off_has_no_effect_and_one_of_what_is_on_has(
    switched_off: str, setting: str
) -> None:
    """Those that a short run on one process does not show."""
    switched_on = switched_off.replace("no-", "") if "no-" in switched_off else switched_off.replace(".", ".no-")
    assert given(switched_on, *setting.split()) == []
    (line,) = given(switched_off, *setting.split())
    assert "has no effect here" in line


def test_a_setting_that_was_given_and_does_nothing_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert given("--optim.muon.lr", "0.1", "--train.threads", "2") == []
    assert given("--optim.matrices", "adamw", "--optim.muon.lr", "0.1") == [
        "--optim.muon.lr 0.1 has no effect here; it takes a group that Muon moves (--optim.matrices muon)"
    ]
    assert given("--slurm.minutes", "5") == ["--slurm.minutes 5 has no effect here; it takes --launch slurm"]
    assert given("--slurm.minutes", "5", "--launch", "slurm") == []
    capsys.readouterr()
    assert main(["plan", "demo", "--optim.average.blend", "0.5"]) == 0
    assert capsys.readouterr().err.startswith("paceline: --optim.average.blend 0.5 has no effect here; it takes --opt")
