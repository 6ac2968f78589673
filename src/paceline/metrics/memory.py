"""The most memory a run has held: the device's allocator on a GPU, the process's resident size on a CPU."""

import sys


def peak_bytes(device: str) -> int | None:
    """Largest memory so far on `device` ("cpu" or "cuda…"); None where the system does not tell."""
    if device.startswith("cuda"):
        import torch

        return int(torch.cuda.max_memory_allocated(device))
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # KiB on Linux
