"""The demo, several times in a row, each in a process of its own from launch to exit, and its figures as one JSON file.

python benchmarks/demo.py --out benchmarks/results/demo-cpu.json [--runs 3] [--picture docs/images/demo-loss.svg]
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

from curve_svg import loss_curve_svg

from paceline.core.environment import code_version, environment
from paceline.core.files import write_json
from paceline.core.schema import to_dict
from paceline.metrics.card import read_card

TARGETS = {"wall_s": 100.0, "val_bpb": 1.75, "peak_resident_gb": 1.5}
"""Upper limits on 2 CPU cores."""


def run_once(folder: Path, cache: Path) -> dict[str, float]:
    """One `paceline train demo` with an empty cache, as a newcomer starts it."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "paceline.cli", "train", "demo", "--out", str(folder)]
    subprocess.run(command, check=True, env={**os.environ, "PACELINE_CACHE_DIR": str(cache)}, stdout=sys.stderr)
    wall_s = time.perf_counter() - started
    card = read_card(folder)
    return {
        "wall_s": round(wall_s, 1),
        "train_s": round(card.train_s or 0, 1),
        "val_loss": round(card.val_loss or 0, 4),
        "val_bpb": round(card.val_bpb or 0, 4),
        "tokens_per_s": round(card.tokens_per_s or 0),
        "peak_resident_gb": round((card.peak_bytes or 0) / 1e9, 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--picture", type=Path, help="the loss curve of the last run goes here")
    arguments = parser.parse_args()
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(arguments.runs):
            run = Path(folder) / f"run-{number}"
            runs.append(run_once(run, Path(folder) / f"cache-{number}"))
        if arguments.picture is not None:
            arguments.picture.write_text(loss_curve_svg(run), encoding="utf-8")
    met = all(run[name] <= limit for run in runs for name, limit in TARGETS.items())
    result = {
        "what": "paceline train demo, from launch to exit, empty cache, runs in a row",
        "date": datetime.now(UTC).date().isoformat(),
        "code": to_dict(code_version()),
        "environment": environment(),
        "targets": TARGETS,
        "met": met,
        "runs": runs,
        "children_peak_resident_gb": round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / 1e9, 2),
    }
    write_json(arguments.out, result)
    print(json.dumps(result, indent=1))
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
