"""Triton kernels on a CPU: tests of a file run in a process of their own, in which Triton interprets. The switch is
read when a kernel is defined, so it cannot be turned within a process that may have compiled ones.

The interpreter's products know no bf16: use fp32 or fp16 there. It accepts programs that the compiler refuses, so a
kernel also wants `compiles`."""

import os
import subprocess
import sys
from pathlib import Path


def run_interpreted(name: str, *options: str) -> None:
    """Run the tests of `name`, a file beside this one that pytest does not collect by itself."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *options, name]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    folder = Path(__file__).parent
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
