"""What a machine lacks costs speed, never the run, and the run says so."""

import builtins
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.core import environment, probe
from paceline.metrics import memory
from paceline.metrics.card import read_card
from paceline.metrics.meter import LAUNCH_VARIABLE, seconds_since_launch
from paceline.parallel.machine import inspect_machine
from paceline.recipes.presets import preset
from train.tiny import losses, run, tiny_config

GPU = probe.Verdict(name="cuda", usable=True, reason="a GPU of a test")


@pytest.fixture
def gpu_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A GPU of some capability, with Triton and a compiler unless a test takes them away."""

    def describe(capability: tuple[int, int], *, triton: bool = True, compilers: bool = True) -> None:
        monkeypatch.setattr(probe, "cuda", lambda: GPU)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
        monkeypatch.setattr(probe, "package_versions", lambda *_: {"triton": "3.6"} if triton else {})
        monkeypatch.setattr(probe.importlib.util, "find_spec", lambda name: object())
        monkeypatch.setattr(probe.shutil, "which", lambda name: f"/bin/{name}" if compilers else None)

    return describe


def test_a_gpu_before_ampere_multiplies_in_fp32_and_says_so(gpu_of: Any) -> None:
    gpu_of((7, 5))
    config, machine = inspect_machine(preset("r18-softcap"))
    assert config.model.precision.compute == "fp32"
    assert config.train.compile
    assert not machine.bf16
    assert machine.lacks == ("products in fp32 instead of bf16: capability 7.5; bf16 products need 8.0",)
    assert machine.lacks[0] in machine.notes
    assert (machine.backends.attention.name, machine.backends.lm_head.name) == ("flex", "reference")


def test_an_ampere_gpu_has_no_kernels_of_ours_and_lacks_nothing_else(gpu_of: Any) -> None:
    gpu_of((8, 6))
    config, machine = inspect_machine(preset("r18-softcap"))
    assert config.model.precision.compute == "bf16"
    assert machine.lacks == ()
    assert machine.backends.mlp.name == "reference"
    assert "8.6" in machine.backends.mlp.reason


@pytest.mark.parametrize(
    ("lacking", "reason"),
    [({"triton": False}, "the package triton is not installed"), ({"compilers": False}, "no compiler: gcc")],
)
def test_without_triton_or_a_compiler_a_gpu_runs_uncompiled(lacking: dict[str, bool], reason: str, gpu_of: Any) -> None:
    gpu_of((8, 6), **lacking)
    config, machine = inspect_machine(preset("r18-softcap"))
    assert not config.train.compile
    assert (machine.backends.attention.name, machine.backends.lm_head.name) == ("reference", "chunked")
    assert machine.backends.qkv.name == machine.backends.mlp.name == "reference"
    (lack,) = machine.lacks
    assert lack.startswith(f"not compiled, hence slower: {reason}")


def test_heads_too_narrow_for_flex_attention_take_the_reference(gpu_of: Any) -> None:
    gpu_of((8, 6))
    record = preset("r18-softcap")
    _, machine = inspect_machine(replace(record, model=replace(record.model, width=48, head_dim=8)))
    assert machine.backends.attention.name == "reference"
    assert "no kernel for --model.head-dim 8" in machine.backends.attention.reason


def test_a_cpu_without_a_compiler_trains_uncompiled_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(probe.shutil, "which", lambda name: None)
    config = tiny_config(tmp_path / "data", steps=2)
    done = run(replace(config, train=replace(config.train, compile=True)), tmp_path / "run")
    assert done.run.forward is done.run.model
    said = "not compiled, hence slower: no compiler: g++, clang++ are not installed"
    assert said in capsys.readouterr().out
    assert said in read_card(tmp_path / "run").notes
    run(config, tmp_path / "plain")
    assert losses(tmp_path / "run") == losses(tmp_path / "plain")


def test_a_system_like_macos_runs_without_proc_and_affinity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No /proc, no cgroups, no sched_getaffinity, no CLOCK_BOOTTIME."""
    real = builtins.open

    def no_proc(file: Any, *arguments: Any, **options: Any) -> Any:
        if str(file).startswith(("/proc", "/sys")):
            raise FileNotFoundError(file)
        return real(file, *arguments, **options)

    monkeypatch.setattr(builtins, "open", no_proc)
    monkeypatch.setattr(memory, "SYSTEM", tmp_path / "nowhere")
    monkeypatch.delattr(environment.os, "sched_getaffinity")
    monkeypatch.delenv(LAUNCH_VARIABLE, raising=False)
    environment.cpu_model.cache_clear()
    try:
        assert environment.cpu_model()
        assert environment.usable_cores() >= 1
        assert seconds_since_launch() == 0.0
        assert memory.available_bytes() == environment.memory_bytes()
        config = tiny_config(tmp_path / "data", steps=2)
        card = run(replace(config, batch=replace(config.batch, micro_tokens=None)), tmp_path / "run").card
        assert card.finished
    finally:
        environment.cpu_model.cache_clear()


def test_a_system_that_does_not_report_its_memory_runs_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Windows: no `resource`, no sysconf."""
    monkeypatch.setitem(sys.modules, "resource", None)
    monkeypatch.setattr(memory, "SYSTEM", tmp_path / "nowhere")
    monkeypatch.setattr(memory, "memory_bytes", lambda: None)
    assert memory.peak_bytes("cpu") is None
    assert memory.available_bytes() is None
    config = tiny_config(tmp_path / "data", steps=2)
    done = run(replace(config, batch=replace(config.batch, micro_tokens=None)), tmp_path / "run")
    assert done.card.finished
    assert done.card.peak_bytes is None
    assert done.run.config.batch.micro_tokens == 1024


GROUP = "sys/fs/cgroup/memory"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"proc/meminfo": "MemTotal: 9000 kB\nMemAvailable:    5000 kB\n"}, 5000 * 1024),
        ({f"{GROUP}.max": "3000", f"{GROUP}.current": "1000", f"{GROUP}.stat": "anon 1000\n"}, 2000),
        (
            {f"{GROUP}.max": "3000", f"{GROUP}.current": "2900", f"{GROUP}.stat": "active_file 500\ninactive_file 9\n"},
            609,
        ),
        ({f"{GROUP}.max": "max", f"{GROUP}.current": "1000", f"{GROUP}.stat": "anon 1000\n"}, None),
        (
            {"proc/meminfo": "MemAvailable: 1 kB\n", f"{GROUP}.max": "9", f"{GROUP}.current": "1", f"{GROUP}.stat": ""},
            8,
        ),
        ({"proc/meminfo": "MemAvailable: many\n"}, None),
    ],
)
def test_free_memory_is_what_system_and_container_leave(
    files: dict[str, str], expected: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(memory, "SYSTEM", tmp_path)
    monkeypatch.setattr(memory, "memory_bytes", lambda: None)
    assert memory.available_bytes() == expected
