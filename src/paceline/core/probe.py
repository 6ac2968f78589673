"""Which back ends this machine can use, and why or why not. torch is imported inside the functions only.

A CPU that reports bf16 products may kill the process at the first one of real size (SIGILL, which no `except` catches;
up to 16x16 it passes), so they are tried in a child process, once per processor and torch version: 3 s, then remembered
in the cache folder.
"""

import functools
import importlib.util
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.core.environment import cpu_model, package_versions
from paceline.core.errors import ConfigError
from paceline.core.files import read_cache, remember

BF16_TRIAL = """
import torch
import torch.nn.functional as F
for width in (64, 65):  # one that fills the blocks of the fast kernels and one that leaves a rest
    x = torch.randn(width, width, dtype=torch.bfloat16, requires_grad=True)
    F.linear(x, torch.randn(width, width, dtype=torch.bfloat16, requires_grad=True)).float().sum().backward()
q = torch.randn(1, 2, 64, 64, dtype=torch.bfloat16, requires_grad=True)
F.scaled_dot_product_attention(q, q, q, is_causal=True).float().sum().backward()
"""
TRIAL_S = 120  # a trial that takes longer counts as failed
TRIALS = "probe.json"  # exit codes of trials, in the cache folder
BF16_CAPABILITY = (8, 0)  # NVIDIA's Ampere: the first with bf16 products in hardware
HOPPER = 9
"""Major capability. Our kernels drive its copy engine and matrix units; later GPUs have others."""
FA3_PACKAGE = "flash_attn_interface"
FA3_LIBRARY = "PACELINE_FA3_LIBRARY"
"""In the environment, a library to load in place of the package. No setting: a run's config may be from anybody."""


@dataclass(frozen=True)
class Verdict:
    name: str
    usable: bool
    reason: str


@dataclass(frozen=True)
class Choice:
    name: str
    reason: str


def cuda() -> Verdict:
    import torch

    if torch.cuda.is_available():
        return Verdict("cuda", True, f"{torch.cuda.get_device_name()}, {_capability()[1]}")
    if torch.version.cuda is None:
        return Verdict("cuda", False, f"PyTorch {torch.__version__} is built without CUDA")
    return Verdict("cuda", False, "no NVIDIA GPU or driver is visible to this process")


def _capability() -> tuple[tuple[int, int], str]:
    """Of the current GPU, as numbers and as text."""
    import torch

    major, minor = torch.cuda.get_device_capability()
    return (major, minor), f"capability {major}.{minor}"


def choose_device(requested: str) -> Choice:
    """The device for `--train.device`: auto, cpu or cuda. A named one that is missing is refused."""
    if requested == "cpu":
        return Choice("cpu", "asked for by --train.device cpu")
    verdict = cuda()
    if requested == "cuda" and not verdict.usable:
        raise ConfigError(
            f"--train.device cuda cannot be used: {verdict.reason}; use --train.device cpu, with a small --scale"
        )
    return Choice("cuda" if verdict.usable else "cpu", verdict.reason)


def bf16_products(device: str) -> Verdict:
    return _bf16_on_cuda() if device.startswith("cuda") else _bf16_on_cpu()


def choose_products(requested: str, device: str) -> Choice:
    """The format of matrix products for a preset that asks for `requested`: bf16 only on a GPU that has it. On CPUs it
    was never faster than fp32 here, and on some it ends the process."""
    if requested == "fp32":
        return Choice("fp32", "asked for by the preset")
    if not device.startswith("cuda"):
        return Choice("fp32", "a CPU computes the bf16 products of a preset in fp32")
    verdict = bf16_products(device)
    return Choice("bf16" if verdict.usable else "fp32", verdict.reason)


def _bf16_on_cuda() -> Verdict:
    capability, found = _capability()
    usable = capability >= BF16_CAPABILITY
    return Verdict("bf16", usable, found if usable else f"{found}; bf16 products need 8.0")


@functools.cache
def _bf16_on_cpu() -> Verdict:
    """Tried once for each processor, torch version and instruction limit, then remembered."""
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "no limit")
    key = " | ".join(("bf16", cpu_model(), f"torch {package_versions('torch').get('torch')}", limit))
    exit_code = read_cache(TRIALS).get(key)
    if type(exit_code) is not int:
        exit_code = _exit_code_of(BF16_TRIAL)
        remember(TRIALS, key, exit_code)
    if exit_code == 0:
        return Verdict("bf16", True, "trial products in a child process passed")
    how = f"was killed by signal {-exit_code}" if exit_code < 0 else f"ended with code {exit_code}"
    return Verdict("bf16", False, f"a child process trying bf16 products {how}; fp32 is used")


def _exit_code_of(code: str) -> int:
    try:
        return subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=TRIAL_S).returncode
    except subprocess.TimeoutExpired:
        return 124


def triton() -> Verdict:
    """The kernel compiler that FlexAttention and torch.compile need on a GPU."""
    version = package_versions("triton").get("triton")
    if version is None or importlib.util.find_spec("triton") is None:
        return Verdict("triton", False, "the package triton is not installed")
    gpu = cuda()
    return Verdict(
        "triton", gpu.usable, f"version {version}" + ("" if gpu.usable else f" is installed, but {gpu.reason}")
    )


def compiler(device: str) -> Verdict:
    """torch.compile: needs a C++ compiler on a CPU; on a GPU Triton, and a C compiler for its launchers."""
    on_gpu = device.startswith("cuda")
    variable, programs = ("CC", ("gcc", "clang", "cc")) if on_gpu else ("CXX", ("g++", "clang++"))
    if on_gpu and not (kernels := triton()).usable:
        return Verdict("torch.compile", False, kernels.reason)
    found = next((name for name in (os.environ.get(variable), *programs) if name and shutil.which(name)), None)
    reason = f"compiles with {Path(found).name}" if found else f"no compiler: {', '.join(programs)} are not installed"
    return Verdict("torch.compile", found is not None, reason)


def flex_attention(device: str) -> Verdict:
    """FlexAttention, compiled. It has no backward pass on a CPU."""
    if not device.startswith("cuda"):
        return Verdict("flex", False, "FlexAttention has no backward pass on a CPU")
    if not (compiles := compiler(device)).usable:
        return Verdict("flex", False, f"FlexAttention must be compiled: {compiles.reason}")
    return Verdict("flex", True, "FlexAttention, compiled")


def varlen_attention(device: str) -> Verdict:
    """FlashAttention 2 over packed documents, as PyTorch carries it."""
    if not device.startswith("cuda"):
        return Verdict("varlen", False, "FlashAttention needs a GPU")
    import torch

    if not torch.backends.cuda.is_flash_attention_available():
        return Verdict("varlen", False, f"PyTorch {torch.__version__} is built without it")
    verdict = _bf16_on_cuda()
    return Verdict("varlen", verdict.usable, f"FlashAttention 2 of PyTorch; {verdict.reason}")


def flash_attention_3(device: str) -> Verdict:
    """FlashAttention 3 from a library or an installed package, which is loaded to be sure and stays so."""
    name = "flash-attention-3"
    if not device.startswith("cuda"):
        return Verdict(name, False, "FlashAttention needs a GPU")
    (major, _), found = _capability()
    if major != HOPPER:
        return Verdict(name, False, f"{found}; it needs {HOPPER}.x")
    library = os.environ.get(FA3_LIBRARY) or None
    failure = _load_fa3(library)
    return Verdict(name, failure is None, failure or f"from {library or f'the package {FA3_PACKAGE}'}; {found}")


def _load_fa3(library: str | None) -> str | None:
    """Why its operators cannot be had, or None."""
    import torch

    if library is None and importlib.util.find_spec(FA3_PACKAGE) is None:
        return f"the package {FA3_PACKAGE} is not installed and ${FA3_LIBRARY} names no library"
    try:
        if library is None:
            importlib.import_module(FA3_PACKAGE)
        else:
            torch.ops.load_library(library)
    except (OSError, ImportError, RuntimeError) as error:
        return f"{library or FA3_PACKAGE} cannot be loaded: {str(error).splitlines()[0]}"
    missing = [name for name in ("fwd", "bwd") if not hasattr(torch.ops.flash_attn_3, name)]
    return f"{library or FA3_PACKAGE} registers no flash_attn_3.{missing[0]}" if missing else None


def own_kernels(device: str) -> Verdict:
    """Our kernels, in Triton and Gluon. They are for Hopper and were tuned on an H200; other GPUs take the twins."""
    verdict = replace(ranges_attention(device), name="fused")
    if not verdict.usable or _capability()[0][0] == HOPPER:
        return verdict
    return replace(verdict, usable=False, reason=f"{verdict.reason}; our kernels besides attention are for {HOPPER}.0")


def ranges_attention(device: str) -> Verdict:
    """Our attention kernels: in Gluon on Hopper, in Triton on other GPUs with bf16 products."""
    if not device.startswith("cuda"):
        return Verdict("ranges", False, "our kernels need a GPU")
    if not (kernels := triton()).usable:
        return Verdict("ranges", False, kernels.reason)
    capability, found = _capability()
    if capability < BF16_CAPABILITY:
        return Verdict("ranges", False, f"{found}; our kernels need 8.0")
    if capability[0] == HOPPER and importlib.util.find_spec("triton.experimental.gluon") is None:
        return Verdict("ranges", False, "this Triton has no Gluon; 3.6 has")
    return Verdict("ranges", True, found)


def back_ends(device: str) -> list[Verdict]:
    """Everything the doctor reports for a device, in the order in which a step meets it."""
    return [
        cuda(),
        bf16_products(device),
        triton(),
        compiler(device),
        Verdict("reference", True, "plain PyTorch, on any device; it defines the result"),
        flex_attention(device),
        ranges_attention(device),
        own_kernels(device),
        varlen_attention(device),
        flash_attention_3(device),
    ]
