"""A checkpoint is wholly there or not at all, and damage is found before anything is loaded."""

import builtins
import contextlib
import json
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from checkpoint.samples import FILES, assert_loads, checkpoint, equal, saved
from paceline.checkpoint import store, tensors
from paceline.checkpoint.manifest import seal_of
from paceline.checkpoint.run_folder import RunFolder
from paceline.checkpoint.save import save, set_aside_after
from paceline.core.errors import ConfigError, PacelineError, RunError


def test_what_was_saved_is_loaded_and_the_oldest_is_pruned(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    for step in (1, 2, 3):
        save(run, checkpoint(step), keep=2)
        assert_loads(run, step)
    assert [path.name for path in run.checkpoints()] == ["step_000002", "step_000003"]
    assert sorted(path.name for path in run.checkpoint(3).iterdir()) == sorted(FILES)


def test_files_are_safetensors_that_others_can_read(tmp_path: Path) -> None:
    run = saved(tmp_path, 1)
    found = load_file(run.checkpoint(1) / "model-00001.safetensors")
    expected = checkpoint(1).model
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_a_group_is_cut_into_files_of_limited_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "FILE_BYTES", 100)
    large = {f"w{number}": torch.randn(number, 7) for number in range(1, 9)}
    save(RunFolder(tmp_path), checkpoint(1, model=large), keep=2)
    files = sorted(tmp_path.glob("checkpoints/step_000001/model-*"))
    assert [path.name for path in files] == [f"model-{number:05d}.safetensors" for number in range(1, len(files) + 1)]
    assert len(files) == 7  # 28 and 56 bytes share one, then each is too large for company
    assert equal(store.load(tmp_path / "checkpoints/step_000001"), checkpoint(1, model=large))


def test_weights_are_filled_in_place_or_not_at_all(tmp_path: Path) -> None:
    folder = saved(tmp_path, 1).checkpoint(1)
    weights = {name: torch.zeros_like(tensor) for name, tensor in checkpoint(1).model.items()}
    kept = weights["a"]
    store.load_weights_into(folder, weights)
    assert torch.equal(kept, checkpoint(1).model["a"])
    for wrong, word in (
        ({"a": kept}, "b is in the checkpoint only"),
        (weights | {"c": kept}, "c is not in the checkpoint"),
        (weights | {"b": torch.zeros(5)}, r"b is torch.bfloat16 \(4,\), but this run needs torch.float32 \(5,\)"),
    ):
        kept.zero_()
        with pytest.raises(RunError, match=word):
            store.load_weights_into(folder, wrong)
        assert not kept.any()


@pytest.mark.parametrize("name", tensors.NAMES.values())
def test_every_number_format_comes_back_as_it_was(name: str, tmp_path: Path) -> None:
    """In every bit, also of a scalar and of nothing, and for other readers of the file."""
    dtype = {name: dtype for dtype, name in tensors.NAMES.items()}[name]
    random = torch.randint(0, 2 if dtype is torch.bool else 100, (5, 3)).to(dtype)
    given = {"some": random, "one": random[0, 0].clone(), "none": torch.zeros(0, 4, dtype=dtype)}
    tensors.write_group(tmp_path, "model", {**given, "wider": torch.ones(3, dtype=torch.float64)})
    found = store.read_group(tmp_path, ["model-00001.safetensors"])
    public = load_file(tmp_path / "model-00001.safetensors")
    for read in (found, public):
        assert all(read[n].dtype == t.dtype and torch.equal(read[n], t) for n, t in given.items())
    targets = {n: torch.empty_like(t) for n, t in found.items()}
    store.read_group_into(tmp_path, ["model-00001.safetensors"], targets)
    assert all(torch.equal(targets[n], t) for n, t in found.items())


def test_a_tensor_of_another_format_or_shape_is_not_converted(tmp_path: Path) -> None:
    """copy_ would: fp32 into bf16 loses bits, and (3, 2) fits (1, 3, 2)."""
    folder = saved(tmp_path, 1).checkpoint(1)
    a, b = (torch.zeros_like(tensor) for tensor in checkpoint(1).model.values())
    for wrong, word in (
        ({"a": a.bfloat16(), "b": b}, r"a is torch.float32 \(3, 2\), but this run needs torch.bfloat16 \(3, 2\)"),
        ({"a": a, "b": b.half()}, "b is torch.bfloat16 .* needs torch.float16"),
        ({"a": a[None], "b": b}, r"a is .* needs torch.float32 \(1, 3, 2\)"),
        ({"a": a.int(), "b": b}, "a is torch.float32 .* needs torch.int32"),
    ):
        with pytest.raises(RunError, match=word):
            store.load_weights_into(folder, wrong)
        assert not any(tensor.any() for tensor in wrong.values())


def test_a_format_that_no_checkpoint_has_is_refused(tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F8_E4M3", "shape": [8], "data_offsets": [0, 8]}}).encode()
    (tmp_path / "m.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(RunError, match="a: a checkpoint holds no numbers of format F8_E4M3"):
        store.read_group(tmp_path, ["m.safetensors"])


# ---- damage


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("template"), 1, 2).path


@pytest.fixture
def two(template: Path, tmp_path: Path) -> RunFolder:
    """A run with checkpoints of steps 1 and 2."""
    return RunFolder(shutil.copytree(template, tmp_path / "run"))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x20
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("spoil", [flip, truncate, Path.unlink])
def test_damage_is_named_and_the_one_before_is_taken(
    two: RunFolder, name: str, spoil: Callable[[Path], object]
) -> None:
    spoil(two.checkpoint(2) / name)
    _, passed_over = store.newest_good(two)
    assert len(passed_over) == 1
    assert passed_over[0].startswith(f"step_000002: {name}: ")
    assert_loads(two, 1)


def rewrite(path: Path, changes: dict[str, Any]) -> None:
    """A manifest that lies, and vouches for its lie."""
    content = {**json.loads(path.read_text()), **changes}
    content.pop("seal")
    path.write_text(json.dumps(content | {"seal": seal_of(content)}))


def entry(**changes: Any) -> dict[str, Any]:
    return {"name": "state.json", "bytes": 1, "blake2b": "00", **changes}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"format": 4}, "format 4, this version reads 1 to 3"),
        ({"format": "3"}, "states no format"),
        ({"step": 7}, "is that of step 7"),
        ({"step": True}, "step: expected int"),
        ({"files": []}, "lacks state.json or the weights"),
        ({"files": [entry(), entry()]}, "lists a file twice"),
        ({"files": [entry(name="../../other/state.json")]}, "not a file of this folder"),
        ({"files": [entry(name="/etc/passwd")]}, "not a file of this folder"),
        ({"files": [entry(name="..")]}, "not a file of this folder"),
        ({"more": 1}, "unknown key"),
        ({"files": [entry(bytes=-1), entry(name="model-1.safetensors")]}, "bytes instead of -1"),
    ],
)
def test_a_manifest_that_lies_is_found_out(two: RunFolder, changes: dict[str, Any], said: str) -> None:
    rewrite(two.checkpoint(2) / "manifest.json", changes)
    _, passed_over = store.newest_good(two)
    assert said in passed_over[0]
    assert_loads(two, 1)


def test_a_checkpoint_under_the_name_of_another_step_is_found_out(tmp_path: Path) -> None:
    """All of its hashes hold, but a run that went on from it would count its steps from the name."""
    run = saved(tmp_path, 1, 2)
    run.checkpoint(2).rename(run.checkpoint(3))
    _, passed_over = store.newest_good(run)
    assert passed_over == ["step_000003: manifest.json: is that of step 2"]
    assert_loads(run, 1)


def test_checkpoints_are_set_aside_where_older_ones_already_are(tmp_path: Path) -> None:
    """As by a second rewind before the next save."""
    run = saved(tmp_path, 1, 2)
    for _ in range(2):
        set_aside_after(run, 1)
        assert [path.name for path in run.checkpoints()] == ["step_000001"]
        shutil.copytree(run.checkpoint(1), run.checkpoint(2))
    set_aside_after(run, 1)
    assert [path.name for path in run.set_aside()] == ["set_aside_step_000002"]


def test_a_manifest_of_another_checkpoint_is_found_out(tmp_path: Path) -> None:
    run = saved(tmp_path, 1, 2)
    shutil.copy(run.checkpoint(1) / "manifest.json", run.checkpoint(2) / "manifest.json")
    assert store.damage(run.checkpoint(2)) == "manifest.json: is that of step 1"


def test_what_this_version_does_not_know_is_passed_over_and_said(tmp_path: Path) -> None:
    run = saved(tmp_path, 1, 2)

    def usable(folder: Path) -> None:
        if folder.name == "step_000002":
            raise ConfigError("config.json: model.flux: unknown key")

    folder, passed_over = store.newest_good(run, usable=usable)
    assert folder.name == "step_000001"
    assert passed_over == ["step_000002: config.json: model.flux: unknown key"]


def test_a_run_without_a_checkpoint_says_so(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="none was saved yet"):
        store.newest_good(RunFolder(tmp_path))


def test_the_newest_of_a_step_or_before(tmp_path: Path) -> None:
    run = saved(tmp_path, 1, 4, 9)
    assert store.newest_good(run, until=8)[0].name == "step_000004"
    with pytest.raises(RunError, match="none is of step 0 or before"):
        store.newest_good(run, until=0)


def test_checkpoints_left_behind_are_set_aside_until_the_next_save(tmp_path: Path) -> None:
    run = saved(tmp_path, 1, 4, 9)
    set_aside_after(run, 4)
    assert [path.name for path in run.checkpoints()] == ["step_000001", "step_000004"]
    assert [path.name for path in run.set_aside()] == ["set_aside_step_000009"]
    save(run, checkpoint(5), keep=2)
    assert run.set_aside() == []
    assert [path.name for path in run.checkpoints()] == ["step_000004", "step_000005"]


def test_a_file_that_claims_more_than_it_has_is_refused_before_anything_is_allocated(tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(RunError, match="not a safetensors file"):
        store.read_group(tmp_path, ["model.safetensors"])
    (tmp_path / "model.safetensors").write_bytes((2**62).to_bytes(8, "little") + header)
    with pytest.raises(RunError, match="not a safetensors file"):
        store.read_group(tmp_path, ["model.safetensors"])


# ---- a save that fails


class Disk:
    """Fails the call with a given number, of all that write to the disk, as a full one does."""

    def __init__(self, fails_at: int) -> None:
        self.calls, self.fails_at = 0, fails_at

    def __call__(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        self.calls += 1
        if self.calls == self.fails_at:
            raise OSError(28, "No space left on device")
        return function(*arguments, **options)


@contextlib.contextmanager
def failing(disk: Disk) -> Iterator[None]:
    plain_open = builtins.open

    def opened(path: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        if "w" not in mode:
            return plain_open(path, mode, *arguments, **options)
        file = disk(plain_open, path, mode, *arguments, **options)
        plain_write = file.write

        class File:
            """A file whose writes count."""

            write = staticmethod(lambda data: disk(plain_write, data))
            __enter__ = lambda self: self  # noqa: E731
            __exit__ = lambda self, *_: file.close()  # noqa: E731
            __getattr__ = lambda self, name: getattr(file, name)  # noqa: E731

        return File()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(builtins, "open", opened)
        for name in ("fsync", "rename", "replace", "mkdir"):
            patched.setattr(os, name, partial(disk, getattr(os, name)))
        yield


def test_after_a_failure_at_any_write_the_old_or_the_new_checkpoint_loads(tmp_path: Path) -> None:
    """Opening, writing, flushing, renaming: every call that touches the disk fails once."""
    before = saved(tmp_path / "before", 1)
    for number in range(1, 1000):
        run, disk = RunFolder(tmp_path / str(number)), Disk(number)
        shutil.copytree(before.path, run.path)
        with failing(disk), contextlib.suppress(PacelineError):
            save(run, checkpoint(2), keep=2)
        assert_loads(run, 2 if run.checkpoint(2).exists() else 1)
        assert not list(run.path.glob("checkpoints/.*")), "nothing half-written stays"
        shutil.rmtree(run.path)
        if disk.calls < number:
            break
    assert number > 30
    assert disk.calls == number - 1


def test_a_full_disk_is_one_line_with_what_to_do(tmp_path: Path) -> None:
    run = saved(tmp_path, 1)
    with failing(Disk(5)), pytest.raises(PacelineError, match="is intact, make room and continue with --resume"):
        save(run, checkpoint(2), keep=2)
    assert_loads(run, 1)


def test_a_failure_that_more_room_would_not_mend_does_not_ask_for_it(tmp_path: Path) -> None:
    run = saved(tmp_path, 1)
    large = checkpoint(2, model={"a": torch.zeros(1 << 20)})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(
            PacelineError,
            match=r"step_000002: could not be saved \(File too large\); .* intact, continue with --resume",
        ) as caught:
            save(run, large, keep=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "\n" not in str(caught.value)
    assert_loads(run, 1)


def test_what_a_killed_save_left_is_removed_by_the_next(tmp_path: Path) -> None:
    run = saved(tmp_path, 1)
    (tmp_path / "checkpoints" / ".step_000002.77.tmp").mkdir()
    save(run, checkpoint(3), keep=2)
    assert [path.name for path in sorted((tmp_path / "checkpoints").iterdir())] == ["step_000001", "step_000003"]
