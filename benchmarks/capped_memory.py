"""The same steps on smaller cards: runs under a memory limit against one without.

python benchmarks/capped_memory.py --out result.json [--limits 8 12 24] [--steps 19] [--jobs 2] -- r18-softcap
--steps 266 --data.dir DIR

The limits are in GB of 10^9 bytes, less 0.5 GB for what the driver takes on a real card. Each run cuts its steps as
auto-fit decides. Losses are compared step by step; a second run without a limit shows how far equal runs differ by the
order of atomic sums. Words after `--` are those of `paceline train`.
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

DRIVER_GB = 0.5
TOLERANCE = 0.02
"""Largest difference of a train loss in 19 steps of bf16: rounding grows along a run, equal runs differ as well."""


def arms(words: list[str], limits: list[float], steps: int) -> dict[str, list[str]]:
    common = [
        *words, "--train.stop-after", str(steps), "--evaluate.every", "None", "--metrics.every", "1",
    ]  # fmt: skip
    runs = {"uncapped": common}
    for limit in limits:
        gib = (limit - DRIVER_GB) * 1e9 / 2**30
        runs[f"{limit:g}-gb"] = [*common, "--train.memory-limit-gib", f"{gib:.3f}"]
    return runs | {"uncapped-again": common}  # last, so that two at a time are never both without a limit


def row(run: Run, base: Run) -> dict[str, Any]:
    card = run.card
    pairs = zip(run.train_losses, base.train_losses, strict=True)
    return {
        "peak_gb": None if card.peak_bytes is None else card.peak_bytes / 1e9,
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
    parser.add_argument("words", nargs="+")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = train_all(arms(arguments.words, arguments.limits, arguments.steps), Path(folder), jobs=arguments.jobs)
    rows = {name: row(run, runs["uncapped"]) for name, run in runs.items()}
    result = {
        "what": "the same steps under memory limits, in GB of a card, and without",
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
        print(f"{name:15} peak {each['peak_gb']:.2f} GB, largest difference {each['largest_difference']:.5f}")
    return 0 if result["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
