"""Several real processes, as a user starts them."""

import os
import subprocess
import sys
from pathlib import Path

from train.tiny import write_text_shards

TESTS = Path(__file__).parents[1]


def torchrun(ranks: int, module: str, *arguments: object) -> subprocess.Popen[str]:
    """`torchrun` with so many processes on this machine; what they print comes back as one text."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*command, "-m", module, *map(str, arguments)],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def flags(folder: Path) -> list[str]:
    """Of `paceline train demo`, for a run of a second on shards that this writes into `folder`."""
    write_text_shards(folder / "data")
    given = {
        "model.vocab-size": 257, "model.width": 32, "model.num-heads": 2, "model.head-dim": 16,
        "data.tokenizer": "bytes", "data.end-of-text": 256, "data.dir": folder / "data",
        "batch.sequence-tokens": 128, "batch.tokens": 512,
        "evaluate.every": None, "evaluate.tokens": 256, "checkpoint.every": 5, "train.device": "cpu",
    }  # fmt: skip
    return [str(word) for name, value in given.items() for word in (f"--{name}", value)]
