"""What a power cut finds: every file is on the disk, whole, before the name under which it is looked for, and the name
before anything that relies on it. Seen in the real calls, recorded in their order."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint.samples import FILES, checkpoint
from paceline.checkpoint import tensors
from paceline.checkpoint.run_folder import RunFolder
from paceline.checkpoint.save import save
from paceline.core.files import atomic_write, sync_folder, write_json
from train.tiny import run, tiny_config


@dataclass(frozen=True)
class Call:
    what: str
    """fsync or rename."""
    path: Path
    """Of a rename: to where."""
    bytes: int = 0
    """That a file had when it was flushed."""


@contextmanager
def recorded() -> Iterator[list[Call]]:
    """The calls are made all the same."""
    calls: list[Call] = []
    fsync = os.fsync

    def flushed(handle: int) -> None:
        fsync(handle)
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        calls.append(Call("fsync", path, 0 if path.is_dir() else os.fstat(handle).st_size))

    def noted(rename: Callable[..., Any]) -> Callable[..., Any]:
        def call(source: Any, target: Any, **options: Any) -> Any:
            done = rename(source, target, **options)
            calls.append(Call("rename", Path(target)))
            return done

        return call

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "fsync", flushed)
        patched.setattr(os, "rename", noted(os.rename))
        patched.setattr(os, "replace", noted(os.replace))
        yield calls


pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="the path of a handle is asked of /proc")


def test_a_file_is_flushed_whole_then_renamed_then_its_folder_is_flushed(tmp_path: Path) -> None:
    path = tmp_path / "a" / "card.json"
    with recorded() as calls, atomic_write(path, mode="w") as file:
        file.write("x" * 100)  # less than a buffer, so that only a flush brings it to the file
    written = path.with_name(f".card.json.{os.getpid()}.tmp")
    assert calls == [Call("fsync", written, 100), Call("rename", path), Call("fsync", path.parent)]
    with recorded() as calls:
        write_json(path, {"a": 1})
    assert [call.what for call in calls] == ["fsync", "rename", "fsync"]
    assert calls[0].bytes == path.stat().st_size
    with recorded() as calls:
        sync_folder(tmp_path)
    assert calls == [Call("fsync", tmp_path)]


def test_a_file_that_fails_is_neither_renamed_nor_left(tmp_path: Path) -> None:
    with recorded() as calls, pytest.raises(TypeError), atomic_write(tmp_path / "a") as file:
        file.write("no bytes")
    assert calls == []
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_is_wholly_on_the_disk_before_it_has_its_name(tmp_path: Path) -> None:
    """Tensors and lists, then the manifest that vouches for them, then their folder; after the rename the folder that
    holds the checkpoints. Only then the old checkpoint goes."""
    run = RunFolder(tmp_path)
    save(run, checkpoint(1), keep=1)
    with recorded() as calls:
        save(run, checkpoint(2), keep=1)
    final = run.checkpoint(2)
    temporary = final.with_name(f".{final.name}.{os.getpid()}.tmp")
    published = calls.index(Call("rename", final))
    before, after = calls[:published], calls[published + 1 :]
    assert after == [Call("fsync", final.parent)]
    flushed = {call.path.name: call.bytes for call in before if call.what == "fsync"}
    for name in FILES:
        written = f".{name}.{os.getpid()}.tmp" if name.endswith(".json") else name
        assert flushed[written] == (final / name).stat().st_size
    assert before[-2:] == [Call("rename", temporary / "manifest.json"), Call("fsync", temporary)]
    renamed = [call.path.name for call in before if call.what == "rename"]
    assert renamed == ["state.json", "config.json", "manifest.json"]
    last_tensors = max(n for n, call in enumerate(before) if call.path.name.endswith(".safetensors"))
    assert last_tensors < before.index(Call("rename", temporary / "manifest.json"))


def test_tensors_are_flushed_whole_whatever_their_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "WRITE_BYTES", 1000)  # pieces that end within a tensor
    given = {"a": torch.randn(777), "b": torch.randn(3).bfloat16()}
    with recorded() as calls:
        (entry,) = tensors.write_group(tmp_path, "model", given)
    path = tmp_path / "model-00001.safetensors"
    assert calls == [Call("fsync", path, path.stat().st_size)]
    assert entry.bytes == path.stat().st_size


def test_the_metrics_that_a_checkpoint_counts_on_are_on_the_disk_before_it(tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "data", steps=3)
    config = replace(config, evaluate=replace(config.evaluate, every=None, tokens=256))
    config = replace(config, checkpoint=replace(config.checkpoint, every=2))
    with recorded() as calls:
        run(config, tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    published = calls.index(Call("rename", folder.checkpoint(2)))
    lines = folder.metrics.read_bytes().splitlines(keepends=True)
    flushed = [call.bytes for call in calls[:published] if call.path == folder.metrics]
    # two steps, and no part of a line; training goes on beside the save, so a later flush may be there as well
    assert {sum(map(len, lines[:n])) for n in (2, 3)} & set(flushed)
