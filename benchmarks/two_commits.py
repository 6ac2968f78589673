"""Does a change of the code keep losses to the bit and the time of a step? Two checkouts in turn, on one machine.

python benchmarks/two_commits.py --old CHECKOUT --out result.json [--steps 38] [--rounds 3] -- r18-softcap --data.dir D

Losses: one run of each under --train.deterministic, compared to the last bit. Time: `rounds` runs of each without it,
old and new in turn, so that a GPU that warms up or throttles meets both; a step is timed from its metrics line to the
next, and the medians of all steps after the first FIRST_STEPS are compared. Words after `--` are those of
`paceline train`, understood by both.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from paceline.core.environment import code_version, environment
from paceline.core.files import write_json
from paceline.core.schema import to_dict

FIRST_STEPS = 10
"""Not timed: kernels are chosen and memory is laid out. Of a shorter run, half of its steps."""
HERE = Path(__file__).resolve().parents[1]


def lines_of(checkout: Path, words: list[str], folder: Path) -> list[dict[str, Any]]:
    """The metrics of a run of this checkout's code."""
    command = [sys.executable, "-m", "paceline.cli", "train", *words, "--no-finish", "--out", str(folder)]
    path = os.pathsep.join([str(checkout / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, cwd=checkout, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(
            f"{checkout}: {' '.join(command)} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def losses(lines: list[dict[str, Any]]) -> dict[str, float]:
    return {
        f"{line['kind']} {line['step']}": line.get("train_loss", line.get("val_loss"))
        for line in lines
        if line["kind"] in ("step", "eval")
    }


def step_seconds(lines: list[dict[str, Any]]) -> list[float]:
    """Of steps whose metrics line follows that of the step before: nothing was validated or saved between them."""
    steps = [(before, after) for before, after in pairwise(lines) if before["kind"] == after["kind"] == "step"]
    timed = [after["wall_s"] - before["wall_s"] for before, after in steps]
    return timed[min(FIRST_STEPS, len(timed) // 2) :]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--old", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=38)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("words", nargs="+")
    arguments = parser.parse_args()
    words = [*arguments.words, "--steps", str(arguments.steps)]
    checkouts = {"old": arguments.old.resolve(), "new": HERE}
    timed_words = [*words, "--evaluate.every", "None", "--checkpoint.every", "None"]
    with tempfile.TemporaryDirectory() as folder:
        exact = {
            name: losses(lines_of(checkout, [*words, "--train.deterministic"], Path(folder) / f"exact-{name}"))
            for name, checkout in checkouts.items()
        }
        seconds: dict[str, list[float]] = {name: [] for name in checkouts}
        for number in range(arguments.rounds):
            for name, checkout in checkouts.items():
                seconds[name] += step_seconds(lines_of(checkout, timed_words, Path(folder) / f"{name}-{number}"))
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    result = {
        "what": "two checkouts: losses under --train.deterministic, and seconds of a step in turn",
        "words": arguments.words,
        "steps": arguments.steps,
        "rounds": arguments.rounds,
        "date": datetime.now(UTC).date().isoformat(),
        "code": to_dict(code_version()),
        "environment": environment(),
        "bit_equal": exact["old"] == exact["new"],
        "losses": exact,
        "median_step_s": medians,
        "ratio": medians["new"] / medians["old"],
        "step_s": seconds,
    }
    write_json(arguments.out, result)
    print(f"bit-equal {result['bit_equal']}, step new / old {result['ratio']:.4f}: {arguments.out}")
    return 0 if result["bit_equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
