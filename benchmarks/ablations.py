"""What each part of the records does at a sixteenth of the size on a CPU: `paceline ablate`, one record after another.

python benchmarks/ablations.py --work runs/ablations [--series r18 r17] [--jobs 2] [--note TEXT]

Leaves benchmarks/results/cpu-ablation-rNN.json, an `ablation.json` with what it is, its command and its machine. It
goes on where it was stopped. Sequences of 1,024 tokens, one a step, for 24 steps: enough to see which parts act at all,
and far from what a whole run at full size would say.
"""

import argparse
import shlex
import subprocess
import sys
from pathlib import Path

from paceline.core.environment import code_version, environment
from paceline.core.files import write_json
from paceline.core.schema import read_json, to_dict
from paceline.recipes.records import PUBLIC

SETTING = (
    "--scale 1/16 --steps 24 --batch.tokens 1024 --batch.sequence-tokens 1024 --evaluate.every 8 "
    "--evaluate.tokens 4096 --train.untimed-steps 1 --train.threads 1 --seeds 3"
)
SERIES = {
    "r18": "",
    "r17": "--no-add",
    "r05": "--no-add",
    "r14": "",
    "r16": "",
    "r16-ranks": "--no-add --only bucket-views,no-buffer-broadcast --batch.tokens 2048 --steps 8 --jobs 1 "
    "--launch slurm --slurm.cluster local --slurm.gpus 2",  # two ranks a run, on the CPU; 2 sequences for them
    "r13": "--no-add --only momentum-warmup,bf16-tables,document-mask,token-window",
}
"""By the start of the preset's name, in order of weight; of some, only what is asked most, or it would take hours."""
RESULTS = Path(__file__).parent / "results"


def command_of(series: str) -> str:
    preset = next(name for name in PUBLIC if name.startswith(series.partition("-")[0]))
    return f"paceline ablate {preset} {SETTING} {SERIES[series]}".strip()


def ablated(series: str, work: Path, jobs: int, note: str | None) -> None:
    _, verb, preset, *flags = shlex.split(command_of(series))
    folder = work / series
    command = [sys.executable, "-m", "paceline.cli", verb, preset, "--jobs", str(jobs), *flags, "--out", str(folder)]
    subprocess.run(command, check=True)
    found = read_json(folder / "ablation.json")
    what = f"the parts of {found['preset']} against {found['against']} at --scale 1/16 on a CPU, built-in corpus"
    facts = {"what": what, "date": found["made"][:10], "command": command_of(series), "note": note}
    facts |= {"code": to_dict(code_version()), "environment": environment(), "jobs": jobs}
    write_json(RESULTS / f"cpu-ablation-{series}.json", {**facts, **found})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for the runs")
    parser.add_argument("--series", nargs="+", choices=SERIES, default=list(SERIES))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--note", default=None, help="what a reader of the times should know about the machine")
    arguments = parser.parse_args()
    for series in arguments.series:
        ablated(series, arguments.work, arguments.jobs, arguments.note)
    return 0


if __name__ == "__main__":
    sys.exit(main())
