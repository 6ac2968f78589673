"""What each part of the records does at a sixteenth of the size on a CPU: `paceline ablate`, one record after another.

python benchmarks/ablations.py --work runs/ablations [--records r18 r17] [--jobs 2]

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
    "--evaluate.tokens 4096 --train.free-steps 1 --train.threads 1 --seeds 3"
)
RECORDS = {
    "r18": "",
    "r17": "--no-add",
    "r05": "--no-add",
    "r14": "",
    "r16": "",
    "r13": "--no-add --only momentum-warmup,bf16-tables,document-mask,token-window,softcap,zero-head",
    "r15": "--no-add",
}
"""In order of weight, with what is left out where the whole diff would take hours."""
RESULTS = Path(__file__).parent / "results"


def command_of(record: str) -> str:
    preset = next(name for name in PUBLIC if name.startswith(record))
    return f"paceline ablate {preset} {SETTING} {RECORDS[record]}".strip()


def ablated(record: str, work: Path, jobs: int) -> None:
    _, *words = shlex.split(command_of(record))
    folder = work / record
    command = [sys.executable, "-m", "paceline.cli", *words, "--jobs", str(jobs), "--out", str(folder)]
    subprocess.run(command, check=True)
    found = read_json(folder / "ablation.json")
    what = f"the parts of {found['preset']} against {found['against']} at --scale 1/16 on a CPU, built-in corpus"
    facts = {"what": what, "date": found["made"][:10], "command": command_of(record)}
    facts |= {"code": to_dict(code_version()), "environment": environment(), "jobs": jobs}
    write_json(RESULTS / f"cpu-ablation-{record}.json", {**facts, **found})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for the runs")
    parser.add_argument("--records", nargs="+", choices=RECORDS, default=list(RECORDS))
    parser.add_argument("--jobs", type=int, default=1)
    arguments = parser.parse_args()
    for record in arguments.records:
        ablated(record, arguments.work, arguments.jobs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
