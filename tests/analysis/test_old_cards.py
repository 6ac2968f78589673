"""Runs of version 0.1, as it wrote them: an equal run of today is in their group, under every name that has changed
since and beside every setting that is gone."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.analysis.groups import SAME_EXPERIMENT, Group, changed_settings, groups_of
from paceline.analysis.runs import StoredRun, read_run
from paceline.core.migrations import REMOVED, RENAMED, leaves, migrate_field
from train import frozen
from train.tiny import run, write_text_shards

OLD_FORMATS = ("format-1", "format-2")
"""Those whose runs are of version 0.1; the third was written after the names had changed."""
CHANGED: dict[str, Any] = {
    "attention.heads": "reference",
    "guard.skip": False,
    "head.backend": "reference",
    "metrics.instruments": True,
    "model.head_init": "uniform",
    "model.head_multiple": 64,
    "model.rotary.turning_share": 0.25,
    "model.tied_head": True,
    "optim.adam.head_lr": 0.016,
    "parallel.fully_shard": True,
    "parallel.shard_adam": True,
    "parallel.split_sequence": 2,
    "train.fast_paths": False,
    "train.free_steps": 3,
}
"""By its name in version 0.1, a setting of each entry of RENAMED, with a value that the frozen runs do not have."""
GONE: dict[str, Any] = {
    "attention.fa3_library": "/lib/fa3.so",
    "optim.adam.grouping": "other",
    "parallel.broadcast_buffers": True,
}


@pytest.fixture(scope="module")
def today(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The frozen runs' config, carried out by this version as far as they were."""
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(tmp_path_factory.mktemp("today"))
        write_text_shards(frozen.DATA)
        run(frozen.config(), Path("run"))
        return Path("run").resolve()


def grouped(*folders: Path) -> list[Group[StoredRun]]:
    return groups_of(map(read_run, folders))


def with_settings(folder: Path, values: dict[str, Any], name_of: Callable[[str], str | None], to: Path) -> Path:
    """A copy of a run whose config and card say these settings by the names that `name_of` gives."""
    shutil.copytree(folder, to)
    config, card = (json.loads((to / name).read_text()) for name in ("config.json", "card.json"))
    for old, value in values.items():
        name = name_of(old)
        assert name is not None
        *path, leaf = name.split(".")
        part = config
        for step in path:
            part = part.setdefault(step, {})
        card["diff"].append({"field": name, "before": part.get(leaf), "after": value})
        part[leaf] = value
    for name, content in (("config.json", config), ("card.json", card)):
        (to / name).write_text(json.dumps(content))
    return to


@pytest.mark.parametrize("name", OLD_FORMATS)
def test_a_frozen_run_and_an_equal_one_of_today_are_one_experiment(name: str, today: Path) -> None:
    """Though its config has a dozen names that are others today, and three settings that are gone."""
    old = json.loads((frozen.FOLDER / name / "config.json").read_text())
    written = [setting for setting, _ in leaves(old)]
    assert sum(migrate_field(setting) != setting for setting in written) > 12
    assert set(REMOVED) <= set(written)
    (group,) = grouped(frozen.FOLDER / name, today)
    assert len(group.members) == 2
    assert group.members[0].card.code_version.version == "0.1.0"


def test_every_rename_and_removal_is_tried() -> None:
    """A new one needs a row here."""
    assert len(CHANGED) == len(RENAMED)
    for old in RENAMED:
        assert any(name == old or name.startswith(f"{old}.") for name in CHANGED), old
    assert GONE.keys() == REMOVED.keys()


@pytest.mark.parametrize("name", CHANGED)
def test_a_setting_by_its_old_name_is_the_same_experiment_as_by_todays(name: str, today: Path, tmp_path: Path) -> None:
    """In the config and in the card's diff; and it is no idle copy: an unchanged run is another experiment."""
    changes = {name: CHANGED[name]}
    old = with_settings(frozen.FOLDER / "format-2", changes, lambda old: old, tmp_path / "old")
    new = with_settings(today, changes, migrate_field, tmp_path / "new")
    (group,) = grouped(old, new)
    assert len(group.members) == 2
    one, other = (changed_settings(member) for member in group.members)
    assert one == other
    alike = str(migrate_field(name)).startswith(SAME_EXPERIMENT)
    assert len(grouped(old, today)) == (1 if alike else 2)
    assert len(one) == (0 if alike else 1)


def test_a_setting_that_is_gone_makes_no_other_experiment(today: Path, tmp_path: Path) -> None:
    old = with_settings(frozen.FOLDER / "format-2", GONE, lambda old: old, tmp_path / "old")
    (group,) = grouped(old, frozen.FOLDER / "format-1", today)
    assert len(group.members) == 3
    assert [changed_settings(member) for member in group.members] == [{}, {}, {}]
