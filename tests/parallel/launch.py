"""Several real processes, as a user starts them."""

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]


def torchrun(ranks: int, module: str, *arguments: object) -> subprocess.Popen[str]:
    """`torchrun` with so many processes on this machine; what they print comes back as one text."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = os.environ | {"PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*command, "-m", module, *map(str, arguments)],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
