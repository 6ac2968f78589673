"""What a run ran on, in plain strings and numbers, and which code ran. No host, user or folder names: cards are shared.

torch is not imported for this: its version comes from the package's metadata and the GPU from nvidia-smi, or from torch
where it is loaded already.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import paceline
from paceline.core.files import blake2b_of

Environment = dict[str, str | int | float]

ANSWER_S = 10  # how long another program (git, nvidia-smi) may take before it counts as absent


@dataclass(frozen=True, kw_only=True)
class CodeVersion:
    version: str
    commit: str | None = None  # of the checkout the package is imported from; None for an installed one
    dirty: bool | None = None  # whether that checkout's package differs from its commit


def environment() -> Environment:
    """Versions, CPU, memory and, where there is one, the GPU with its clock."""
    facts: Environment = {
        "python": platform.python_version(),
        **package_versions("torch", "triton", "numpy"),
        "platform": platform.platform(),
        "cpu": cpu_model(),
        "cores": usable_cores(),
    }
    if (memory := memory_bytes()) is not None:
        facts["memory_bytes"] = memory
    return {**facts, **_gpu_by_driver(), **_gpu_by_torch()}


def package_versions(*names: str) -> Environment:
    found: Environment = {}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


@functools.cache
def cpu_model() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        fields = dict(line.split(":", 1) for line in file.read().split("\n\n")[0].splitlines() if ":" in line)
        named = {key.strip(): value.strip() for key, value in fields.items()}
        if name := named.get("model name"):
            numbers = [named[key] for key in ("cpu family", "model") if key in named]
            return f"{name} ({'/'.join(numbers)})" if numbers else name
    return platform.processor() or platform.machine()


def usable_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _gpu_by_driver() -> Environment:
    """The first GPU as nvidia-smi describes it; empty where it does not answer."""
    fields = "name,driver_version,memory.total,clocks.sm"
    lines = answer_of("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits")
    rows = [line.split(", ") for line in (lines or "").splitlines() if line.count(", ") == fields.count(",")]
    if not rows:
        return {}
    name, driver, memory_mib, clock_mhz = rows[0]
    gpu: Environment = {"gpu": name, "gpu_count": len(rows), "gpu_driver": driver}
    if memory_mib.isdigit():
        gpu["gpu_memory_bytes"] = int(memory_mib) * 2**20
    return {**gpu, "gpu_sm_clock_mhz": int(clock_mhz)} if clock_mhz.isdigit() else gpu


def _gpu_by_torch() -> Environment:
    """The GPU that torch uses, if torch is loaded: it may see fewer of them than the driver does."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return {}
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "gpu": properties.name,
        "gpu_count": torch.cuda.device_count(),
        "gpu_memory_bytes": properties.total_memory,
        "cuda": str(torch.version.cuda),
    }


def code_version() -> CodeVersion:
    """The package's version and, in a checkout, its commit."""
    package = Path(paceline.__file__).resolve().parent
    top = answer_of("git", "-C", str(package), "rev-parse", "--show-toplevel")
    if not top or Path(top).resolve() / "src" / "paceline" != package:  # installed, maybe inside some other checkout
        return CodeVersion(version=paceline.__version__)
    commit = answer_of("git", "-C", str(package), "rev-parse", "HEAD")
    changed = answer_of("git", "-C", str(package), "status", "--porcelain", "--", str(package))
    dirty = None if changed is None else changed != ""
    return CodeVersion(version=paceline.__version__, commit=commit or None, dirty=dirty)


@functools.cache
def code_digest() -> str:
    """Of every source file of the package, installed or not, committed or not: equal code has an equal one."""
    package = Path(paceline.__file__).resolve().parent
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package).as_posix()} {blake2b_of(path)}\n".encode())
    return digest.hexdigest()


def answer_of(*command: str) -> str | None:
    """What a program prints; None if it is missing, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
