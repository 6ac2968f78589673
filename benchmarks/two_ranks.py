"""Two gloo ranks with a thread each against one process with two threads, on two CPU cores: pairs of runs in turn.

python benchmarks/two_ranks.py --out benchmarks/results/two-ranks-cpu.json [--pairs 5] [--steps 20]

A pair is one run of each kind, which of them goes first changes; the figure is the median over pairs of the ratio of
their tokens/s, which both take by the train clock (start and first steps are not counted). Needs a machine with two
cores that are otherwise idle: the load before each pair is written down.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from paceline.core.environment import code_version, environment
from paceline.core.files import write_json
from paceline.core.schema import to_dict
from paceline.metrics.card import read_card

AIM = 0.9
"""Share of one process's throughput that two ranks should reach."""
FREE_STEPS = 3
"""Steps before the clock of a run starts."""
PRESET = ("demo", "--batch.tokens", "8192", "--batch.micro-tokens", "4096")
"""A step of about 1 s on two cores. Both kinds compute micro-batches of one size: two here, or one on each rank."""
KINDS = {
    "one_process": (1, 2),
    "two_ranks": (2, 1),
}
"""Name to the number of processes and the threads of each."""


def tokens_per_s(kind: str, folder: Path, steps: int) -> float:
    """Of one run, from launch to exit in processes of its own."""
    processes, threads = KINDS[kind]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    flags = {
        "steps": steps, "out": folder, "evaluate.every": None, "evaluate.tokens": 1024, "checkpoint.every": None,
        "train.device": "cpu", "train.threads": threads, "train.untimed-steps": FREE_STEPS,
    }  # fmt: skip
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, *(launcher if processes > 1 else []), "-m", "paceline.cli", "train", *PRESET, *words]
    subprocess.run(
        [*command, "--no-finish"],
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        stdout=sys.stderr,
    )
    rate = read_card(folder).tokens_per_s
    assert rate is not None
    return rate


def measure_pair(number: int, folder: Path, steps: int) -> dict[str, float]:
    load = os.getloadavg()[0]
    order = list(KINDS) if number % 2 == 0 else list(reversed(KINDS))
    rates = {kind: tokens_per_s(kind, folder / f"{number}-{kind}", steps) for kind in order}
    shown = {kind: round(rate) for kind, rate in rates.items()}
    return {**shown, "ratio": round(rates["two_ranks"] / rates["one_process"], 3), "load_before": round(load, 2)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        pairs = [measure_pair(number, Path(folder), arguments.steps) for number in range(arguments.pairs)]
    median = statistics.median(pair["ratio"] for pair in pairs)
    result = {
        "what": "tokens/s of two gloo ranks with a thread each over those of one process with two threads",
        "preset": " ".join(PRESET),
        "steps": arguments.steps,
        "date": datetime.now(UTC).date().isoformat(),
        "code": to_dict(code_version()),
        "environment": environment(),
        "aim": AIM,
        "median_ratio": median,
        "met": median >= AIM,
        "pairs": pairs,
    }
    write_json(arguments.out, result)
    print(f"median {median:.3f} of {len(pairs)} pairs, aim {AIM}: {arguments.out}")
    return 0 if result["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
