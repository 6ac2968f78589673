"""How runs are named, found and opened."""

import os
from pathlib import Path

import pytest

from paceline.checkpoint.run_folder import RunFolder, left_only_if_used, new_run_folder, open_run
from paceline.core.errors import RunError


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_runs_are_found_by_path_by_name_and_by_age() -> None:
    for age, name in enumerate(("old", "new")):
        RunFolder(Path("runs") / name).write_config({})
        os.utime(f"runs/{name}/config.json", (age, age))
    assert open_run("runs/old").path == Path("runs/old")
    assert open_run("old").path == Path("runs/old")
    assert open_run("latest").path == Path("runs/new")
    with pytest.raises(RunError, match="there are new, old"):
        open_run("other")


def test_a_folder_whose_start_was_interrupted_is_not_a_run() -> None:
    Path("runs/torn").mkdir(parents=True)
    with pytest.raises(RunError, match=r"no config\.json"):
        open_run("torn")
    with pytest.raises(RunError, match="no run yet"):
        open_run("latest")


def test_a_new_run_never_takes_the_folder_of_another() -> None:
    first = new_run_folder("demo", None)
    first.write_config({})
    assert new_run_folder("demo", None).path == Path("runs/demo-2")
    with pytest.raises(RunError, match="holds a run already"):
        new_run_folder("demo", "runs/demo")


def test_a_folder_goes_with_the_error_that_left_it_empty() -> None:
    for launch in (None, "torchrun 1"):
        folder = new_run_folder("demo", None, launch=launch)
        with pytest.raises(RunError, match="refused"), left_only_if_used(folder):
            raise RunError("refused")
        assert not folder.path.exists()
    folder = new_run_folder("demo", None)
    folder.write_config({})
    with pytest.raises(RunError, match="later"), left_only_if_used(folder):
        raise RunError("later")
    assert folder.config.exists()


def test_a_run_folder_that_cannot_be_made_is_one_line() -> None:
    Path("file").write_text("")
    with pytest.raises(RunError, match="cannot be made"):
        new_run_folder("demo", "file/run")


def test_checkpoints_are_listed_by_step_and_temporary_ones_are_not(tmp_path: Path) -> None:
    for name in ("step_000010", "step_1000000", "step_000002", ".step_000011.77.tmp", "step_x"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert [path.name for path in RunFolder(tmp_path).checkpoints()] == ["step_000002", "step_000010", "step_1000000"]
