"""Several real processes, as a user starts them."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from paceline.checkpoint.run_folder import RunFolder
from train.tiny import write_text_shards

TESTS = Path(__file__).parents[1]


def torchrun(ranks: int, module: str, *arguments: object, restarts: int = 0) -> subprocess.Popen[str]:
    """`torchrun` with so many processes on this machine; what they print comes back as one text."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return _start([*command, "--max-restarts", str(restarts), "-m", module, *map(str, arguments)])


def one_rank(
    rank: int, world: int, port: int, *arguments: object, package: Path | None = None
) -> subprocess.Popen[str]:
    """One process of several without torchrun, as a cluster starts them; `package`: where else its code is."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    environment = {name: str(value) for name, value in place.items()}
    if package is not None:
        environment["PYTHONPATH"] = str(package)
    return _start([sys.executable, "-m", "paceline.cli", *map(str, arguments)], **environment)


def _start(command: list[str], **environment: str) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        command,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def child_of(launcher: subprocess.Popen[str], rank: int) -> int:
    """The process that torchrun started with this rank."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            mine = parent == launcher.pid and f"\0RANK={rank}\0" in (folder / "environ").read_text()
        except OSError:  # it has ended meanwhile
            continue
        if mine:
            return int(folder.name)
    raise AssertionError(f"rank {rank} is not there")


def wait_for_checkpoint(run: Path, launcher: subprocess.Popen[str]) -> None:
    while not RunFolder(run).checkpoints():
        assert launcher.poll() is None, launcher.communicate()[0]
        time.sleep(0.05)


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
