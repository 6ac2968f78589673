"""The most memory a run has held, and how much of the machine's is free."""

import contextlib
import sys
from pathlib import Path

from paceline.core.environment import memory_bytes

SYSTEM = Path("/")  # where Linux tells about itself


def peak_bytes(device: str) -> int | None:
    """Largest memory so far: of the device's allocator ("cuda…"), or the process's resident size ("cpu")."""
    if device.startswith("cuda"):
        import torch

        return int(torch.cuda.max_memory_allocated(device))
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # KiB on Linux


def available_bytes() -> int | None:
    """Memory that this process may still take: Linux's own estimate, less where a container has less; elsewhere all
    that the machine has. None where the system does not tell."""
    known = [bytes_ for bytes_ in (_available_on_linux(), _left_in_container()) if bytes_ is not None]
    return min(known) if known else memory_bytes()


def _available_on_linux() -> int | None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in (SYSTEM / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def _left_in_container() -> int | None:
    """What the control group's limit leaves. Cached files are counted as taken there, but give way."""
    group = SYSTEM / "sys/fs/cgroup"
    with contextlib.suppress(OSError, ValueError):  # no group, or a limit of "max"
        limit, taken = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        facts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        cached = sum(int(facts.get(name, 0)) for name in ("active_file", "inactive_file"))
        return max(0, min(limit, limit - taken + cached))
    return None
