"""Names of older versions lead to today's settings: in configs, on cards, on command lines."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import main
from paceline.core import migrations
from paceline.core.migrations import REMOVED, RENAMED, migrate_config, migrate_field, migrate_flags
from paceline.core.schema import flatten, to_dict
from paceline.recipes.presets import PRESETS, preset
from paceline.settings.run import read_config


def old_names(values: dict[str, Any]) -> dict[str, Any]:
    """A config of today as version 0.1 wrote it."""
    back = {new: old for old, new in RENAMED.items()}
    found: dict[str, Any] = {}
    for name, value in migrations.leaves(values):
        group = next((new for new in back if name == new or name.startswith(f"{new}.")), None)
        *path, leaf = (name if group is None else back[group] + name[len(group) :]).split(".")
        part = found
        for step in path:
            part = part.setdefault(step, {})
        part[leaf] = value
    return found


@pytest.mark.parametrize("name", PRESETS)
def test_a_config_under_its_old_names_is_todays(name: str) -> None:
    before = old_names(to_dict(preset(name)))
    assert "head" in before
    assert "lm_head" not in before
    assert read_config(before) == preset(name)
    assert read_config(to_dict(preset(name))) == preset(name)


def test_every_rename_leads_to_a_setting_and_hides_none() -> None:
    fields = [name for name, _ in flatten(preset("demo"))]
    groups = {".".join(name.split(".")[:depth]) for name in fields for depth in (1, 2, 3)}
    for old, new in RENAMED.items():
        assert new in groups, f"{old} leads to {new}, which is no setting"
        assert old not in groups, f"{old} is a setting today"
    assert not set(REMOVED) & groups


def test_what_is_gone_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REMOVED, "optim.adam.phase", "it never did anything")
    assert migrate_field("optim.adam.phase") is None
    assert migrate_config({"optim": {"adam": {"phase": 3, "eps": 1.0}}}) == {"optim": {"adam": {"eps": 1.0}}}
    told: list[str] = []
    words = ["demo", "--optim.adam.phase", "3", "--steps", "4", "--optim.adam.phase=3"]
    assert migrate_flags(words, told.append) == ["demo", "--steps", "4"]
    assert told == ["--optim.adam.phase is gone and has no effect: it never did anything"] * 2


def test_old_flags_work_and_name_the_new_one() -> None:
    told: list[str] = []
    words = [
        "r18-softcap",
        "--train.no-fast-paths",
        "--head.backend",
        "chunked",
        "--parallel.split-sequence=2",
        "--seed",
        "1",
    ]
    assert migrate_flags(words, told.append) == [
        *("r18-softcap", "--train.no-custom-kernels", "--lm-head.backend", "chunked"),
        *("--parallel.context-parallel=2", "--seed", "1"),
    ]
    assert told == [
        "--train.no-fast-paths is now --train.no-custom-kernels",
        "--head.backend is now --lm-head.backend",
        "--parallel.split-sequence is now --parallel.context-parallel",
    ]


def test_a_command_takes_an_old_flag_with_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    flags = ["--train.free-steps", "3", "--gpus", "1", "--gpu", "h200", "--json"]
    assert main(["plan", "r18-softcap", *flags]) == 0
    assert capsys.readouterr().err == "paceline: --train.free-steps is now --train.untimed-steps\n"


def test_what_is_no_config_stays_what_it_is() -> None:
    assert migrate_config([1, 2]) == [1, 2]
    assert dataclasses.asdict(preset("demo").bad_steps) == {"skip": True, "spike": None, "limit": 10}
