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
FLEX_HEAD_DIM = 16
"""FlexAttention's narrowest head."""
FUSED_MAJOR = 9
"""Hopper, whose copy engine and matrix units our kernels drive; later cards have others."""
FA3_MAJOR = 9
"""FlashAttention 3 is written for Hopper and for nothing later."""
FA3_PACKAGE = "flash_attn_interface"


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


def flex_attention(device: str, head_dim: int = 128) -> Verdict:
    """FlexAttention, compiled. It has no backward pass on a CPU and no kernel for narrow heads."""
    if head_dim < FLEX_HEAD_DIM:
        reason = f"FlexAttention has no kernel for --model.head-dim {head_dim}, below {FLEX_HEAD_DIM}"
        return Verdict(name="flex", usable=False, reason=reason)
    if not device.startswith("cuda"):
        return Verdict(name="flex", usable=False, reason="FlexAttention has no backward pass on a CPU")
    compiles = compiler(device)
    reason = "FlexAttention, compiled" if compiles.usable else f"FlexAttention must be compiled: {compiles.reason}"
    return Verdict(name="flex", usable=compiles.usable, reason=reason)


def reference_attention() -> Verdict:
    return Verdict(name="reference", usable=True, reason="plain PyTorch, on any device; it defines the result")


def varlen_attention(device: str) -> Verdict:
    """FlashAttention 2 over packed documents, as PyTorch carries it."""
    if not device.startswith("cuda"):
        return Verdict(name="varlen", usable=False, reason="FlashAttention needs a GPU")
    import torch

    if not torch.backends.cuda.is_flash_attention_available():
        return Verdict(name="varlen", usable=False, reason=f"PyTorch {torch.__version__} is built without it")
    verdict = _bf16_on_cuda()
    return Verdict(name="varlen", usable=verdict.usable, reason=f"FlashAttention 2 of PyTorch; {verdict.reason}")


def flash_attention_3(device: str, library: str | None = None) -> Verdict:
    """FlashAttention 3 from a library or an installed package, which is loaded to be sure and stays so."""
    name = "flash-attention-3"
    if not device.startswith("cuda"):
        return Verdict(name=name, usable=False, reason="FlashAttention needs a GPU")
    import torch

    major, minor = torch.cuda.get_device_capability()
    if major != FA3_MAJOR:
        return Verdict(name=name, usable=False, reason=f"capability {major}.{minor}; it needs {FA3_MAJOR}.x")
    failure = _load_fa3(library)
    source = f"the package {FA3_PACKAGE}" if library is None else library
    return Verdict(name=name, usable=failure is None, reason=failure or f"from {source}; capability {major}.{minor}")


def _load_fa3(library: str | None) -> str | None:
    """Why its operators cannot be had, or None."""
    import torch

    if library is None and importlib.util.find_spec(FA3_PACKAGE) is None:
        return f"the package {FA3_PACKAGE} is not installed and --attention.fa3-library names no library"
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
    """Our kernels, in Triton and Gluon. They are for Hopper and were tuned on an H200; other cards take the twins."""
    if not device.startswith("cuda"):
        return Verdict(name="fused", usable=False, reason="our kernels need a GPU")
    if not (kernels := triton()).usable:
        return Verdict(name="fused", usable=False, reason=kernels.reason)
    import torch

    capability = torch.cuda.get_device_capability()
    found = f"capability {capability[0]}.{capability[1]}"
    if capability[0] != FUSED_MAJOR:
        return Verdict(name="fused", usable=False, reason=f"{found}; our kernels are for {FUSED_MAJOR}.0")
    if importlib.util.find_spec("triton.experimental.gluon") is None:
        return Verdict(name="fused", usable=False, reason="this Triton has no Gluon; 3.6 has")
    return Verdict(name="fused", usable=True, reason=found)


def choose_own(flag: str, requested: str, device: str, *, own: str, misfit: str | None, otherwise: Choice) -> Choice:
    """Our kernel called `own` for the setting `flag`, or what is taken `otherwise`. `misfit`: why the kernel does not
    know this model. A kernel that the user names is used or refused; `auto` says why it was passed over."""
    if requested not in ("auto", own):
        return Choice(name=requested, reason=f"asked for by {flag} {requested}")
    verdict = own_kernels(device)
    against = misfit if verdict.usable else verdict.reason
    if against is None:
        return Choice(name=own, reason=f"our kernel; {verdict.reason}")
    if requested == own:
        raise ConfigError(f"{flag} {own} cannot be used: {against}; use {flag} auto")
    return Choice(name=otherwise.name, reason=f"{otherwise.reason}; not {own}: {against}")


def choose_attention(
    requested: str,
    device: str,
    *,
    compiled: bool = True,
    head_dim: int = 128,
    own: bool = True,
    misfit: str | None = None,
) -> Choice:
    """The back end for `--attention.backend`: auto, reference, flex or ranges. A named one that is missing is refused.
    Without `own`, `auto` passes our kernel over; `misfit` says why it does not know this model."""
    if requested == "reference":
        return Choice(name="reference", reason="asked for by --attention.backend reference")
    if requested == "flex":
        return _flex_or_refusal(device, head_dim)
    plain = _flex_where_it_pays(device, head_dim, compiled=compiled)
    if requested == "auto" and not own:
        return plain
    return choose_own("--attention.backend", requested, device, own="ranges", misfit=misfit, otherwise=plain)


def choose_packed(requested: str, device: str, *, misfit: str | None, fa3_library: str | None = None) -> Choice:
    """The back ends `varlen` and `fa3` for `--attention.backend`, used or refused. `misfit`: why not for this model."""
    verdict = varlen_attention(device) if requested == "varlen" else flash_attention_3(device, fa3_library)
    against = misfit if verdict.usable else verdict.reason
    if against is not None:
        raise ConfigError(f"--attention.backend {requested} cannot be used: {against}; use --attention.backend auto")
    return Choice(name=requested, reason=verdict.reason)


def _flex_or_refusal(device: str, head_dim: int) -> Choice:
    flex = flex_attention(device, head_dim)
    if not flex.usable:
        raise ConfigError(
            f"--attention.backend flex cannot be used: {flex.reason}; use --attention.backend reference or auto"
        )
    return Choice(name="flex", reason=flex.reason)


def _flex_where_it_pays(device: str, head_dim: int, *, compiled: bool) -> Choice:
    """Uncompiled, FlexAttention holds all T² scores."""
    flex = flex_attention(device, head_dim)
    if flex.usable and not compiled:
        return Choice(name="reference", reason="FlexAttention pays only in compiled code; see --train.compile")
    return Choice(name="flex" if flex.usable else "reference", reason=flex.reason)


def choose_head(
    requested: str, device: str, *, compiled: bool, own: bool = True, misfit: str | None = None, chunks: bool = False
) -> Choice:
    """The back end for `--head.backend`: auto, reference, chunked or fused. All but the last work everywhere. `chunks`:
    `--head.chunk-tokens` is given."""
    if compiled and chunks:
        plain = Choice(name="chunked", reason="asked for by --head.chunk-tokens")
    elif compiled:
        plain = Choice(name="reference", reason="the compiler fuses cap and loss")
    else:
        plain = Choice(name="chunked", reason="without a compiler, chunks save the passes over all logits")
    if requested == "auto" and not own:
        return plain
    return choose_own("--head.backend", requested, device, own="fused", misfit=misfit, otherwise=plain)


def choose_fused(flag: str, requested: str, device: str, *, own: bool = True, misfit: str | None = None) -> Choice:
    """The back end for `--mlp.backend` and `--attention.heads`: auto, reference or fused."""
    plain = Choice(name="reference", reason="plain PyTorch")
    if requested == "auto" and not own:
        return plain
    return choose_own(flag, requested, device, own="fused", misfit=misfit, otherwise=plain)


def back_ends(device: str) -> list[Verdict]:
    """Everything the doctor reports for a device, in the order in which a step meets it."""
    return [
        cuda(),
        bf16_products(device),
        triton(),
        compiler(device),
        reference_attention(),
        flex_attention(device),
        own_kernels(device),
        varlen_attention(device),
        flash_attention_3(device),
    ]
