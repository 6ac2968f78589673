"""How runs are named, found and opened."""

import contextlib
import os
from pathlib import Path

import pytest

from paceline.checkpoint.run_folder import RunFolder, new_run, open_run
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
    with new_run("demo", None) as first:
        first.write_config({})
    with new_run("demo", None) as second:
        assert second.path == Path("runs/demo-2")
    refused("runs/demo", "holds a run already")


def refused(out: str, why: str, *, launch: str | None = None) -> None:
    with pytest.raises(RunError, match=why), new_run("demo", out, launch=launch):
        pytest.fail("it was taken")


def test_checkpoints_whose_config_is_lost_are_a_run_too() -> None:
    RunFolder(Path("run")).checkpoint(5).mkdir(parents=True)
    refused("run", "holds a run already")


@pytest.mark.parametrize("name", ["dataset.json", "x_train_000001.bin"])
def test_a_folder_of_data_is_no_place_for_a_run(name: str) -> None:
    Path("data").mkdir()
    Path("data", name).touch()
    refused("data", "holds data")


def test_an_empty_name_is_neither_a_folder_nor_a_run() -> None:
    RunFolder(Path()).write_config({})  # nor the run that may lie here
    refused("", "--out '': names no folder")
    with pytest.raises(RunError, match="'': names no run"):
        open_run("")


def test_a_launch_that_is_restarted_goes_on_in_its_folder_and_no_other_launch_does() -> None:
    with new_run("demo", "run", launch="torchrun 1") as folder:
        folder.write_config({})
    with new_run("demo", "run", launch="torchrun 1"):
        refused("run", "another process", launch="torchrun 2")
    refused("run", "holds a run already", launch="torchrun 2")
    with new_run("demo", "run", launch="torchrun 1"):
        pass


def test_a_folder_goes_with_the_error_that_left_it_empty() -> None:
    for launch in (None, "torchrun 1"):
        with pytest.raises(RunError, match="refused"), new_run("demo", None, launch=launch) as folder:
            raise RunError("refused")
        assert not folder.path.exists()
    with contextlib.suppress(RunError), new_run("demo", None) as folder:
        folder.write_config({})
        raise RunError("later")
    assert folder.config.exists()


def test_a_folder_that_was_there_stays() -> None:
    Path("mine").mkdir()
    with pytest.raises(RunError, match="refused"), new_run("demo", "mine"):
        raise RunError("refused")
    assert list(Path("mine").iterdir()) == []


@pytest.mark.parametrize(("out", "why"), [("file/run", "cannot be made"), ("file", "is no folder")])
def test_a_run_folder_that_cannot_be_made_is_one_line(out: str, why: str) -> None:
    Path("file").write_text("")
    refused(out, why)


def test_checkpoints_are_listed_by_step_and_temporary_ones_are_not(tmp_path: Path) -> None:
    for name in ("step_000010", "step_1000000", "step_000002", ".step_000011.77.tmp", "step_x"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert [path.name for path in RunFolder(tmp_path).checkpoints()] == ["step_000002", "step_000010", "step_1000000"]
