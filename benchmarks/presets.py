"""Every preset at a sixteenth of its size on a CPU: seconds a step and whether it learns, as one JSON file.

python benchmarks/presets.py --out benchmarks/results/presets-cpu-scale16.json [--steps 50] [--note TEXT]

Each preset is a `paceline train` of its own on the built-in corpus. Seconds a step are differences between the train
times of neighbouring steps; the first step, which allocates, is left out. The target is judged by the median. The
fastest step is told beside it: on a shared machine the median is that of the neighbours, too.
"""

import argparse
import itertools
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from paceline.core.environment import code_version, environment
from paceline.core.files import write_json
from paceline.core.schema import to_dict
from paceline.metrics.metrics_file import read_metrics
from paceline.recipes.records import PUBLIC

TARGET_S = 1.0
"""About a second a step, the slowest preset included."""
THREADS = 2


def command_of(preset: str, steps: int) -> str:
    flags = f"--scale 1/16 --steps {steps} --train.threads {THREADS} --train.untimed-steps 1 --evaluate.every None"
    return f"paceline train {preset} {flags} --no-finish"


def measured(preset: str, steps: int, folder: Path) -> dict[str, Any]:
    _, *words = shlex.split(command_of(preset, steps))
    run, cache = folder / preset, {"PACELINE_CACHE_DIR": str(folder / "cache")}
    command = [sys.executable, "-m", "paceline.cli", *words, "--out", str(run)]
    subprocess.run(command, check=True, env={**os.environ, **cache}, stdout=sys.stderr)
    records, evaluations = read_metrics(run)
    step_s = [after.train_s - before.train_s for before, after in itertools.pairwise(records)]
    return {
        "preset": preset,
        "steps": len(records),
        "median_step_s": round(statistics.median(step_s), 3),
        "fastest_step_s": round(min(step_s), 3),
        "tokens_per_step": records[0].tokens,
        "first_train_loss": records[0].train_loss,
        "last_train_loss": records[-1].train_loss,
        "val_loss": evaluations[-1].val_loss,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--note", default=None, help="what a reader of the times should know about the machine")
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        presets = [measured(preset, arguments.steps, Path(folder)) for preset in PUBLIC]
    met = all(one["median_step_s"] <= TARGET_S for one in presets)
    result = {
        "what": "every record at --scale 1/16 on a CPU, built-in corpus",
        "date": datetime.now(UTC).date().isoformat(),
        "command": command_of("PRESET", arguments.steps),
        "code": to_dict(code_version()),
        "environment": environment(),
        "threads": THREADS,
        "load_average_1min_before": round(load, 2),
        "note": arguments.note,
        "target_median_step_s": TARGET_S,
        "met": met,
        "presets": presets,
    }
    write_json(arguments.out, result)
    print(json.dumps(result, indent=1))
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
