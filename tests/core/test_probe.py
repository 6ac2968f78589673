"""The probe says what it chose and why; a named back end that is missing is refused."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.core import probe
from paceline.core.environment import code_version
from paceline.core.errors import ConfigError

NO_GPU = probe.Verdict(name="cuda", usable=False, reason="no NVIDIA GPU is visible")
GPU = probe.Verdict(name="cuda", usable=True, reason="a GPU, capability 9.0")


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(tmp_path))
    probe._bf16_on_cpu.cache_clear()
    yield
    probe._bf16_on_cpu.cache_clear()


def test_the_cpu_is_probed_in_a_child_that_may_die(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "BF16_TRIAL", "import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    verdict = probe.bf16_products("cpu")
    assert not verdict.usable
    assert "signal 4" in verdict.reason


def test_the_real_trial_ends_in_a_verdict_that_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = probe.bf16_products("cpu")
    assert len(json.loads((tmp_path / "probe.json").read_text())) == 1
    probe._bf16_on_cpu.cache_clear()
    monkeypatch.setattr(probe, "_exit_code_of", lambda code: pytest.fail("tried again"))
    assert probe.bf16_products("cpu") == first


@pytest.mark.parametrize("change", ["processor", "torch", "limit"])
def test_another_processor_or_torch_is_tried_anew(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trials: list[str] = []
    monkeypatch.setattr(probe, "_exit_code_of", lambda code: trials.append(code) or 0)
    probe.bf16_products("cpu")
    probe._bf16_on_cpu.cache_clear()
    if change == "processor":
        monkeypatch.setattr(probe, "cpu_model", lambda: "another")
    elif change == "torch":
        monkeypatch.setattr(probe, "package_versions", lambda *names: {"torch": "99"})
    else:
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    probe.bf16_products("cpu")
    assert len(trials) == 2


@pytest.mark.parametrize("content", ["", "{", "[]", '{"a": "b"}', "\xff"])
def test_a_damaged_memory_is_tried_anew(content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "probe.json").write_text(content, encoding="latin-1")
    monkeypatch.setattr(probe, "_exit_code_of", lambda code: 0)
    assert probe.bf16_products("cpu").usable


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(tmp_path / "file" / "folder"))
    monkeypatch.setattr(probe, "_exit_code_of", lambda code: 1)
    assert not probe.bf16_products("cpu").usable


@pytest.mark.parametrize(("requested", "gpu", "chosen"), [
    ("auto", GPU, "cuda"), ("auto", NO_GPU, "cpu"), ("cpu", GPU, "cpu"), ("cuda", GPU, "cuda"),
])  # fmt: skip
def test_the_device_is_chosen_with_a_reason(
    requested: str, gpu: probe.Verdict, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "cuda", lambda: gpu)
    choice = probe.choose_device(requested)
    assert choice.name == chosen
    assert choice.reason


def test_a_named_device_that_is_missing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "cuda", lambda: NO_GPU)
    with pytest.raises(ConfigError, match=r"--train\.device cuda .*no NVIDIA GPU"):
        probe.choose_device("cuda")


def test_attention_falls_back_only_when_nobody_named_it() -> None:
    assert probe.choose_attention("auto", "cpu").name == "reference"
    assert "backward" in probe.choose_attention("auto", "cpu").reason
    with pytest.raises(ConfigError, match=r"--attention\.backend flex"):
        probe.choose_attention("flex", "cpu")


@pytest.mark.parametrize("has_compiler", [True, False])
def test_on_a_gpu_flex_is_taken_if_it_can_be_compiled(has_compiler: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "cuda", lambda: GPU)
    monkeypatch.setattr(probe, "package_versions", lambda *names: {"triton": "3.6"})
    monkeypatch.setattr(probe.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(probe.shutil, "which", lambda name: f"/bin/{name}" if has_compiler else None)
    assert probe.choose_attention("auto", "cuda", own=False).name == ("flex" if has_compiler else "reference")
    assert probe.choose_attention("reference", "cuda").name == "reference"
    assert probe.choose_attention("auto", "cuda", head_dim=8, own=False).name == "reference"
    with pytest.raises(ConfigError, match=r"no kernel for --model\.head-dim 8"):
        probe.choose_attention("flex", "cuda", head_dim=8)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(probe, "triton", lambda: probe.Verdict(name="triton", usable=True, reason="version 3.6"))
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    return monkeypatch


@pytest.mark.usefixtures("hopper")
def test_our_kernels_are_taken_where_they_work_and_know_the_model() -> None:
    assert probe.choose_attention("auto", "cuda").name == "ranges"
    assert probe.choose_head("auto", "cuda", compiled=True).name == "fused"
    assert probe.choose_head("auto", "cuda", compiled=True, own=False).name == "reference"
    assert probe.choose_head("auto", "cuda", compiled=True, own=False, chunks=True).name == "chunked"
    assert probe.choose_head("chunked", "cuda", compiled=True).name == "chunked"
    assert probe.choose_fused("--mlp.backend", "auto", "cuda").name == "fused"
    assert probe.choose_fused("--mlp.backend", "auto", "cuda", own=False).name == "reference"
    passed_over = probe.choose_fused("--mlp.backend", "auto", "cuda", misfit="it knows relu2 only")
    assert passed_over.name == "reference"
    assert "relu2" in passed_over.reason
    with pytest.raises(ConfigError, match=r"--mlp\.backend fused cannot be used: it knows relu2 only"):
        probe.choose_fused("--mlp.backend", "fused", "cuda", misfit="it knows relu2 only")


def test_an_older_card_falls_back_and_says_why(hopper: pytest.MonkeyPatch) -> None:
    hopper.setattr("torch.cuda.get_device_capability", lambda: (8, 6))
    assert "8.6" in probe.own_kernels("cuda").reason
    assert probe.choose_head("auto", "cuda", compiled=True).name == "reference"
    with pytest.raises(ConfigError, match=r"--head\.backend fused cannot be used: capability 8\.6"):
        probe.choose_head("fused", "cuda", compiled=True)


def test_a_cpu_has_no_kernels_of_ours() -> None:
    assert probe.choose_head("auto", "cpu", compiled=False).name == "chunked"
    with pytest.raises(ConfigError, match=r"--attention\.heads fused .*need a GPU"):
        probe.choose_fused("--attention.heads", "fused", "cpu")


def test_importing_the_probe_does_not_import_torch() -> None:
    imports = "import sys; from paceline.core import environment, probe"
    code = f"{imports}; environment.environment(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_checkout_tells_its_commit() -> None:
    code = code_version()
    assert code.version
    assert code.commit is None or (len(code.commit) == 40 and code.dirty in (True, False))
