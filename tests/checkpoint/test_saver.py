"""Saving beside the training: what is saved is the state of the moment, and no failure goes unreported."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from checkpoint.samples import assert_loads, checkpoint, equal
from paceline.checkpoint import store
from paceline.checkpoint.run_folder import RunFolder
from paceline.checkpoint.save import Saver
from paceline.checkpoint.save import save as save_now
from paceline.core.errors import PacelineError


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Nothing is written before this is set."""
    ready = threading.Event()

    def save(*arguments: Any, **options: Any) -> Path:
        assert ready.wait(timeout=60)
        return save_now(*arguments, **options)

    monkeypatch.setattr("paceline.checkpoint.save.save", save)
    return ready


def test_the_state_may_change_as_soon_as_save_returns(tmp_path: Path, slow_disk: threading.Event) -> None:
    run, state = RunFolder(tmp_path), checkpoint(1)
    with Saver(run, keep=2) as saving:
        saving.save(state)
        for tensor in (*state.model.values(), *state.groups["optimizer"].values()):
            tensor.zero_()
        assert run.checkpoints() == []
        slow_disk.set()
    assert_loads(run, 1)


def test_a_save_waits_for_the_one_before(tmp_path: Path, slow_disk: threading.Event) -> None:
    """Both use the same memory."""
    run = RunFolder(tmp_path)
    with Saver(run, keep=2) as saving:
        saving.save(checkpoint(1))
        threading.Timer(0.1, slow_disk.set).start()
        saving.save(checkpoint(2))
        assert run.checkpoints()[0].name == "step_000001"
    assert equal(store.load(run.checkpoint(1)), checkpoint(1))
    assert equal(store.load(run.checkpoint(2)), checkpoint(2))


@pytest.mark.parametrize("ask", [Saver.check, Saver.wait, lambda saving: saving.save(checkpoint(2))])
def test_a_failure_is_raised_by_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ask: Callable[[Saver], None]
) -> None:
    def save(*_: Any, **__: Any) -> Path:
        raise PacelineError("the disk is full")

    monkeypatch.setattr("paceline.checkpoint.save.save", save)
    saving = Saver(RunFolder(tmp_path), keep=2)
    saving.save(checkpoint(1))
    while not saving._pending.done():  # type: ignore[union-attr]
        pass
    with pytest.raises(PacelineError, match="the disk is full"):
        ask(saving)
    with pytest.raises(PacelineError, match="the disk is full"), saving:  # and at the end, of the last one
        saving.save(checkpoint(3))


def test_what_is_not_to_be_written_is_not_kept(tmp_path: Path) -> None:
    with Saver(RunFolder(tmp_path), keep=2, writes=False) as saving:
        saving.save(checkpoint(1))
        assert saving._buffers == {}
    assert not (tmp_path / "checkpoints").exists()


def test_a_sharded_state_is_saved_whole_and_fills_any_other_sharding(tmp_path: Path) -> None:
    """Of one rank; two share a tensor in tests/parallel."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        plain = torch.arange(12.0).view(4, 3)
        sharded = checkpoint(1, model={"w": distribute_tensor(plain, mesh, [Shard(0)])})
        with Saver(RunFolder(tmp_path), keep=2) as saving:
            saving.save(sharded)
        folder, _ = store.newest_good(RunFolder(tmp_path))
        assert torch.equal(store.load(folder).model["w"], plain)
        other = distribute_tensor(torch.zeros(4, 3), mesh, [Shard(1)])
        store.load_weights_into(folder, {"w": other})
        assert torch.equal(other.full_tensor(), plain)
    finally:
        dist.destroy_process_group()
