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


@pytest.mark.parametrize(("capability", "usable"), [((9, 0), True), ((8, 6), False), ((10, 0), False)])
def test_our_kernels_are_for_hopper_and_name_the_capability_they_find(
    capability: tuple[int, int], usable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "triton", lambda: probe.Verdict(name="triton", usable=True, reason="version 3.6"))
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: capability)
    verdict = probe.own_kernels("cuda")
    assert verdict.usable == usable
    assert f"{capability[0]}.{capability[1]}" in verdict.reason
    assert probe.ranges_attention("cuda").usable


def test_our_attention_needs_bf16_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "triton", lambda: probe.Verdict(name="triton", usable=True, reason="version 3.6"))
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (7, 5))
    assert probe.ranges_attention("cuda").reason == "capability 7.5; our kernels need 8.0"


def test_importing_the_probe_does_not_import_torch() -> None:
    imports = "import sys; from paceline.core import environment, probe"
    code = f"{imports}; environment.environment(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_checkout_tells_its_commit() -> None:
    code = code_version()
    assert code.version
    assert code.commit is None or (len(code.commit) == 40 and code.dirty in (True, False))
