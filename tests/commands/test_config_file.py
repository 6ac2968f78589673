"""`train --config FILE` and `--like RUN`: settings from a file or another run, flags on top."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.cli import main
from paceline.commands.train import base_config, parse_arguments
from paceline.core.schema import to_dict
from paceline.recipes.presets import preset
from paceline.recipes.scaling import with_steps
from paceline.settings.run import RunConfig


def asked(*words: str) -> RunConfig:
    return parse_arguments(words, base_config(words)).config


def write_config(folder: Path, config: RunConfig) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(to_dict(config)))
    return folder / "config.json"


def test_a_runs_config_comes_back_whole_with_flags_on_top(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    demo = with_steps(preset("r18-softcap"), 40)
    config = replace(demo, seed=7, model=replace(demo.model, softcap=20.0))
    path = write_config(tmp_path / "runs/a", config)
    for words in (("--config", str(path)), ("--like", "runs/a"), ("--like", "a"), ("r18-softcap", "--like=latest")):
        assert asked(*words) == config
    assert asked("--like", "a", "--seed", "8", "--model.softcap", "30") == replace(
        config, seed=8, model=replace(demo.model, softcap=30.0)
    )
    assert asked("--like", "a", "--steps", "80") == with_steps(config, 80)


def test_a_toml_states_what_differs_from_its_preset(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('preset = "r17-sparse-values"\nsteps = 50\nmodel.softcap = 20\n[batch]\nmicro-tokens = 65536\n')
    base = with_steps(preset("r17-sparse-values"), 50)
    expected = replace(base, model=replace(base.model, softcap=20.0), batch=replace(base.batch, micro_tokens=65_536))
    assert asked("--config", str(path)) == expected
    path.write_text("seed = 3\n")
    assert asked("--config", str(path)) == replace(preset("demo"), seed=3)
    assert asked("r18-softcap", "--config", str(path)) == replace(preset("r18-softcap"), seed=3)


def test_names_in_lists_may_be_written_as_flags_too(tmp_path: Path) -> None:
    path = tmp_path / "stages.toml"
    path.write_text("[[stages]]\nshare = 0.5\nbatch-tokens = 4096\n[[stages]]\nshare = 0.5\n")
    assert [stage.batch_tokens for stage in asked("--config", str(path)).stages] == [4096, None]


def test_names_of_older_versions_are_todays(tmp_path: Path) -> None:
    path = tmp_path / "old.toml"
    path.write_text("train.free_steps = 3\n")
    assert asked("--config", str(path)).train.untimed_steps == 3


def test_plans_and_schedules_take_them_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_config(tmp_path / "a", with_steps(preset("r18-softcap"), 40))
    assert main(["plan", "--config", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 40


@pytest.mark.parametrize(
    ("text", "words", "said"),
    [
        ("seed = 3", ("--like", "x"), "exclude each other"),
        ("seed = 3", ("--resume", "a"), "--config {path}: --resume goes on"),
        ("sed = 3", (), "{path}: sed: unknown key"),
        ("seed = ", (), "{path}: not valid TOML"),
        ("model.softcap = 'big'", (), "{path}: model.softcap: expected float"),
        ("preset = 'r18'", (), "did you mean r18-softcap?"),
        ("model.softcap = -1", (), "--model.softcap -1.0 must be positive"),
        ("preset = 'r18-softcap'", ("FIRST", "demo"), "demo: {path} has settings of r18-softcap; leave it out"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_file(
    text: str, words: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    write_config(tmp_path / "runs/a", preset("demo"))
    path = tmp_path / "mine.toml"
    path.write_text(text)
    first = words[1:] if words[:1] == ("FIRST",) else ()
    assert main(["train", *first, "--config", str(path), *(() if first else words)]) == 2
    error = capfd.readouterr().err
    assert said.format(path=path) in error
    assert error.count("\n") == 1
