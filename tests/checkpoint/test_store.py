"""A checkpoint is wholly there or not at all, and damage is found before anything is loaded."""

import builtins
import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.checkpoint import store
from paceline.checkpoint.run_folder import RunFolder
from paceline.core.errors import PacelineError, RunError


def checkpoint(step: int) -> store.Checkpoint:
    return store.Checkpoint(
        step=step,
        model={"a": torch.full((3, 2), float(step)), "b": torch.ones(4, dtype=torch.bfloat16)},
        optimizer={"step": torch.tensor(step), "m.a": torch.arange(6.0).view(3, 2)},
        state={"cursor": {"step": step}},
    )


def assert_loads(run: RunFolder, step: int) -> None:
    folder, _ = store.newest_good(run)
    found = store.load(folder)
    expected = checkpoint(step)
    assert found.step == step
    assert found.state == expected.state
    for ours, theirs in ((found.model, expected.model), (found.optimizer, expected.optimizer)):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) and ours[name].dtype == theirs[name].dtype for name in ours)


def test_what_was_saved_is_loaded_and_the_oldest_is_pruned(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    for step in (1, 2, 3):
        store.save(run, checkpoint(step), keep=2)
        assert_loads(run, step)
    assert [path.name for path in run.checkpoints()] == ["step_000002", "step_000003"]


@pytest.mark.parametrize("name", [*store.FILES, "manifest.json"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "delete"])
def test_damage_is_named_and_the_one_before_is_taken(tmp_path: Path, name: str, damage: str) -> None:
    run = RunFolder(tmp_path)
    for step in (1, 2):
        store.save(run, checkpoint(step), keep=2)
    victim = run.checkpoints()[-1] / name
    data = bytearray(victim.read_bytes())
    if damage == "delete":
        victim.unlink()
    else:
        data[len(data) // 2] ^= 0x20
        victim.write_bytes(data if damage == "flip" else data[: len(data) // 2])
    folder, passed_over = store.newest_good(run)
    assert folder.name == "step_000001"
    assert len(passed_over) == 1
    assert "step_000002" in passed_over[0]
    if damage == "delete" or name != "manifest.json":
        assert name in passed_over[0]
    assert_loads(run, 1)


def test_a_newer_format_is_not_guessed_at(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    store.save(run, checkpoint(1), keep=2)
    manifest = run.checkpoint(1) / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(RunError, match="format 2, this version reads 1"):
        store.newest_good(run)


def test_a_run_without_a_checkpoint_says_so(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="none was saved yet"):
        store.newest_good(RunFolder(tmp_path))


def failing_at(call: int, function: Callable[..., Any], counter: list[int]) -> Callable[..., Any]:
    """`function`, but the call with this number raises as a full disk does."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        counter[0] += 1
        if counter[0] == call:
            raise OSError(28, "No space left on device")
        return function(*args, **kwargs)

    return wrapped


@pytest.mark.parametrize("call", range(1, 14))
def test_after_a_failure_at_any_call_the_old_or_the_new_checkpoint_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    run = RunFolder(tmp_path)
    store.save(run, checkpoint(1), keep=2)
    counter = [0]
    with monkeypatch.context() as patched:
        for module, name in ((os, "fsync"), (os, "rename"), (os, "replace"), (builtins, "open")):
            patched.setattr(module, name, failing_at(call, getattr(module, name), counter))
        with contextlib.suppress(PacelineError):
            store.save(run, checkpoint(2), keep=2)
    folder, _ = store.newest_good(run)
    assert_loads(run, 2 if folder.name == "step_000002" else 1)
    assert not list(tmp_path.glob("checkpoints/.*"))
