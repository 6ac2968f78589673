"""Which back ends this machine can use, and why or why not. torch is imported inside the functions only.

Nothing is taken on trust that has been seen to lie. A CPU that reports bf16 products may kill the process at the first
one of real size (SIGILL, which no `except` catches; up to 16x16 it passes), so they are tried in a child process, once
per processor and torch version: 3 s, then remembered in the cache folder. A back end that the user names is used or
refused, never replaced in silence.
"""

import contextlib
import functools
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from paceline.core.environment import cpu_model, package_versions
from paceline.core.errors import ConfigError
from paceline.core.files import cache_folder, write_json

BF16_TRIAL = """
import torch
import torch.nn.functional as F
for width in (64, 65):  # one that fills the blocks of the fast kernels and one that leaves a rest
    x = torch.randn(width, width, dtype=torch.bfloat16, requires_grad=True)
    F.linear(x, torch.randn(width, width, dtype=torch.bfloat16, requires_grad=True)).float().sum().backward()
q = torch.randn(1, 2, 64, 64, dtype=torch.bfloat16, requires_grad=True)
F.scaled_dot_product_attention(q, q, q, is_causal=True).float().sum().backward()
"""
TRIAL_S = 120
"""A trial that takes longer counts as failed."""
BF16_CAPABILITY = (8, 0)
"""NVIDIA's Ampere: the first with bf16 products in hardware."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether something can be used here."""

    name: str
    usable: bool
    reason: str


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What is used, and why."""

    name: str
    reason: str


def cuda() -> Verdict:
    import torch

    if torch.cuda.is_available():
        name, (major, minor) = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
        return Verdict(name="cuda", usable=True, reason=f"{name}, capability {major}.{minor}")
    if torch.version.cuda is None:
        return Verdict(name="cuda", usable=False, reason=f"PyTorch {torch.__version__} is built without CUDA")
    return Verdict(name="cuda", usable=False, reason="no NVIDIA GPU or driver is visible to this process")


def choose_device(requested: str) -> Choice:
    """The device for `--train.device`: auto, cpu or cuda. A named one that is missing is refused."""
    if requested == "cpu":
        return Choice(name="cpu", reason="asked for by --train.device cpu")
    verdict = cuda()
    if verdict.usable:
        return Choice(name="cuda", reason=verdict.reason)
    if requested == "cuda":
        raise ConfigError(
            f"--train.device cuda cannot be used: {verdict.reason}; use --train.device cpu, with a small --scale"
        )
    return Choice(name="cpu", reason=verdict.reason)


def bf16_products(device: str) -> Verdict:
    """Whether matrix products in bf16 work, forward and backward."""
    return _bf16_on_cuda() if device.startswith("cuda") else _bf16_on_cpu()


def choose_products(requested: str, device: str) -> Choice:
    """The format of matrix products for a preset that asks for `requested`: bf16 only on a GPU that has it. On CPUs it
    was never faster than fp32 here and on some it ends the process, so a preset means fp32 on all of them."""
    if requested == "fp32":
        return Choice(name="fp32", reason="asked for by the preset")
    if not device.startswith("cuda"):
        return Choice(name="fp32", reason="a CPU computes the bf16 products of a preset in fp32")
    verdict = bf16_products(device)
    return Choice(name="bf16" if verdict.usable else "fp32", reason=verdict.reason)


def _bf16_on_cuda() -> Verdict:
    import torch

    capability = torch.cuda.get_device_capability()
    usable = capability >= BF16_CAPABILITY
    needs = "" if usable else f"; bf16 products need {BF16_CAPABILITY[0]}.{BF16_CAPABILITY[1]}"
    return Verdict(name="bf16", usable=usable, reason=f"capability {capability[0]}.{capability[1]}{needs}")


@functools.cache
def _bf16_on_cpu() -> Verdict:
    exit_code = _remembered("bf16", lambda: _exit_code_of(BF16_TRIAL))
    if exit_code == 0:
        return Verdict(name="bf16", usable=True, reason="trial products in a child process passed")
    how = f"was killed by signal {-exit_code}" if exit_code < 0 else f"ended with code {exit_code}"
    return Verdict(name="bf16", usable=False, reason=f"a child process trying bf16 products {how}; fp32 is used")


def _exit_code_of(code: str) -> int:
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=TRIAL_S, check=False)
    except subprocess.TimeoutExpired:
        return 124
    return done.returncode


def _remembered(trial: str, run: Callable[[], int]) -> int:
    """The exit code of a trial, run once for each processor, torch version and instruction limit."""
    path = cache_folder() / "probe.json"
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "no limit")
    key = " | ".join((trial, cpu_model(), f"torch {package_versions('torch').get('torch')}", limit))
    known = _read_known(path)
    if key not in known:
        known[key] = run()
        with contextlib.suppress(OSError):  # a cache that cannot be written costs a trial each time, nothing else
            write_json(path, known)
    return known[key]


def _read_known(path: Path) -> dict[str, int]:
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {key: value for key, value in known.items() if type(value) is int} if isinstance(known, dict) else {}


def triton() -> Verdict:
    """The kernel compiler that FlexAttention and torch.compile need on a GPU."""
    version = package_versions("triton").get("triton")
    if version is None or importlib.util.find_spec("triton") is None:
        return Verdict(name="triton", usable=False, reason="the package triton is not installed")
    gpu = cuda()
    reason = f"version {version}" if gpu.usable else f"version {version} is installed, but {gpu.reason}"
    return Verdict(name="triton", usable=gpu.usable, reason=reason)


def compiler(device: str) -> Verdict:
    """torch.compile: needs a C++ compiler on a CPU; on a GPU Triton, and a C compiler for its launchers."""
    on_gpu = device.startswith("cuda")
    variable, programs = ("CC", ("gcc", "clang", "cc")) if on_gpu else ("CXX", ("g++", "clang++"))
    if on_gpu and not (kernels := triton()).usable:
        return Verdict(name="torch.compile", usable=False, reason=kernels.reason)
    found = next((name for name in (os.environ.get(variable), *programs) if name and shutil.which(name)), None)
    if found is None:
        return Verdict(
            name="torch.compile", usable=False, reason=f"no compiler: {', '.join(programs)} are not installed"
        )
    return Verdict(name="torch.compile", usable=True, reason=f"compiles with {Path(found).name}")


def flex_attention(device: str) -> Verdict:
    """FlexAttention, compiled. It has no backward pass on a CPU."""
    if not device.startswith("cuda"):
        return Verdict(name="flex", usable=False, reason="FlexAttention has no backward pass on a CPU")
    compiles = compiler(device)
    reason = "FlexAttention, compiled" if compiles.usable else f"FlexAttention must be compiled: {compiles.reason}"
    return Verdict(name="flex", usable=compiles.usable, reason=reason)


def reference_attention() -> Verdict:
    return Verdict(name="reference", usable=True, reason="plain PyTorch, on any device; it defines the result")


def choose_attention(requested: str, device: str, *, compiled: bool = True) -> Choice:
    """The back end for `--attention.backend`: auto, reference or flex. A named one that is missing is refused.
    Uncompiled, FlexAttention holds all T² scores, so `auto` takes it only for compiled runs."""
    if requested == "reference":
        return Choice(name="reference", reason="asked for by --attention.backend reference")
    flex = flex_attention(device)
    if requested == "auto" and flex.usable and not compiled:
        return Choice(name="reference", reason="FlexAttention pays only in compiled code; see --train.compile")
    if flex.usable:
        return Choice(name="flex", reason=flex.reason)
    if requested == "flex":
        raise ConfigError(
            f"--attention.backend flex cannot be used: {flex.reason}; use --attention.backend reference or auto"
        )
    return Choice(name="reference", reason=flex.reason)


def choose_head(requested: str, *, compiled: bool) -> Choice:
    """The back end for `--head.backend`: auto, reference or chunked. Both work everywhere."""
    if requested != "auto":
        return Choice(name=requested, reason=f"asked for by --head.backend {requested}")
    if compiled:
        return Choice(name="reference", reason="the compiler fuses cap and loss")
    return Choice(name="chunked", reason="without a compiler, chunks save the passes over all logits")


def back_ends(device: str) -> list[Verdict]:
    """Everything the doctor reports for a device, in the order in which a step meets it."""
    not_yet = "not a back end of paceline yet"
    return [
        cuda(),
        bf16_products(device),
        triton(),
        compiler(device),
        reference_attention(),
        flex_attention(device),
        Verdict(name="flash-attention-3", usable=False, reason=not_yet),
        Verdict(name="varlen", usable=False, reason=f"torch.nn.attention.varlen is {not_yet}"),
    ]
