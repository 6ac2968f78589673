"""Do the fast paths change what a run learns? Pairs of runs by seed, with all of them on and all off.

python benchmarks/loss_parity.py --out result.json [--seeds 3] [--steps 38] [--jobs 4] -- r18-softcap --data.dir DIR

The validation loss after the last step is compared. The mean difference should be within the larger of 0.005 and twice
the standard deviation of equal-seed repeats, which differ by the order of atomic sums alone. Words after `--` are those
of `paceline train`, the same for all runs; with several jobs on one GPU give `--batch.micro-tokens`, or each takes what
it finds free.
"""

import argparse
import statistics
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from runs import Run, train_all

from paceline.core.environment import code_version, environment
from paceline.core.files import write_json
from paceline.core.schema import to_dict

LEAST_BOUND = 0.005
REPEATS = 3
"""Runs of the first seed with the fast paths on, the one of the pair included."""


def arms(words: list[str], steps: int, seeds: int) -> dict[str, list[str]]:
    """Name of a run to its words."""
    common = [*words, "--steps", str(steps), "--evaluate.every", "None", "--checkpoint.every", "None"]
    runs = {}
    for seed in range(seeds):
        runs[f"fast-{seed}"] = [*common, "--seed", str(seed)]
        runs[f"plain-{seed}"] = [*common, "--seed", str(seed), "--train.no-custom-kernels"]
    return runs | {f"repeat-{number}": runs["fast-0"] for number in range(1, REPEATS)}


def judge(runs: dict[str, Run], seeds: int) -> dict[str, Any]:
    losses = {name: run.card.val_loss for name, run in runs.items()}
    assert all(loss is not None for loss in losses.values())
    differences = [losses[f"fast-{seed}"] - losses[f"plain-{seed}"] for seed in range(seeds)]
    repeats = [losses["fast-0"], *(losses[f"repeat-{number}"] for number in range(1, REPEATS))]
    spread = statistics.stdev(repeats)
    bound = max(LEAST_BOUND, 2 * spread)
    return {
        "val_loss": losses,
        "differences": differences,
        "mean_difference": statistics.mean(differences),
        "repeat_stdev": spread,
        "bound": bound,
        "met": abs(statistics.mean(differences)) <= bound,
        "train_losses": {name: run.train_losses for name, run in runs.items()},
        "notes": {name: runs[name].card.notes for name in ("fast-0", "plain-0")},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=38)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("words", nargs="+")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = train_all(arms(arguments.words, arguments.steps, arguments.seeds), Path(folder), jobs=arguments.jobs)
    result = {
        "what": "validation loss with all fast paths on and all off, paired by seed",
        "words": arguments.words,
        "steps": arguments.steps,
        "date": datetime.now(UTC).date().isoformat(),
        "code": to_dict(code_version()),
        "environment": environment(),
        **judge(runs, arguments.seeds),
    }
    write_json(arguments.out, result)
    print(f"mean difference {result['mean_difference']:+.5f}, bound {result['bound']:.5f}: {arguments.out}")
    return 0 if result["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
