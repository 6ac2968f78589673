"""The same steps on smaller cards: runs under a memory limit against one without.

python benchmarks/capped_memory.py --out result.json [--limits 8 12 24] [--steps 19] [--jobs 2] -- r18-softcap
--steps 266 --data.dir DIR

The limits are those of cards as they are sold, in GiB (a card of 8 GB has 8,192 MiB), less 0.5 for what the driver
takes. A run under a limit cuts its steps as auto-fit decides, one without takes the records' micro-batch. Losses are
compared step by step; with --repeat a second run without a limit shows how far equal runs differ by the order of
atomic sums.
Words after `--` are those of `paceline train`.
"""

import argparse
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from runs import Run, train_all

from paceline.core.environment import code_version, environment
from paceline.core.files import write_json
from paceline.core.schema import to_dict

DRIVER_GIB = 0.5
MICRO_TOKENS = 65_536
TOLERANCE = 0.02
"""Largest difference of a train loss in 19 steps of bf16: rounding grows along a run, equal runs differ as well."""


def arms(words: list[str], limits: list[float], steps: int, *, repeat: bool) -> dict[str, list[str]]:
    common = [
        *words, "--train.stop-after", str(steps), "--evaluate.every", "None", "--metrics.every", "1",
    ]  # fmt: skip
    free = [*common, "--batch.micro-tokens", str(MICRO_TOKENS)]
    runs = {"uncapped": free} | ({"uncapped-again": free} if repeat else {})
    for limit in limits:
        runs[f"{limit:g}-gb"] = [*common, "--train.memory-limit-gib", str(limit - DRIVER_GIB)]
    return runs


def row(run: Run, base: Run) -> dict[str, Any]:
    card = run.card
    pairs = zip(run.train_losses, base.train_losses, strict=True)
    return {
        "peak_gib": None if card.peak_bytes is None else card.peak_bytes / 2**30,
        "fit": card.fit,
        "largest_difference": max(abs(a - b) for a, b in pairs),
        "last_loss": run.train_losses[-1],
        "train_losses": run.train_losses,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limits", type=float, nargs="+", default=[8, 12, 24])
    parser.add_argument("--steps", type=int, default=19)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--repeat", action="store_true", help="a second run without a limit")
    parser.add_argument("words", nargs="+")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = train_all(
            arms(arguments.words, arguments.limits, arguments.steps, repeat=arguments.repeat),
            Path(folder),
            jobs=arguments.jobs,
        )
    rows = {name: row(run, runs["uncapped"]) for name, run in runs.items()}
    result = {
        "what": "the same steps under memory limits, in GB as cards are sold, and without",
        "words": arguments.words,
        "steps": arguments.steps,
        "date": datetime.now(UTC).date().isoformat(),
        "code": to_dict(code_version()),
        "environment": environment(),
        "tolerance": TOLERANCE,
        "met": all(each["largest_difference"] <= TOLERANCE for each in rows.values()),
        "runs": rows,
    }
    write_json(arguments.out, result)
    for name, each in rows.items():
        print(f"{name:15} peak {each['peak_gib']:.2f} GiB, largest difference {each['largest_difference']:.5f}")
    return 0 if result["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
