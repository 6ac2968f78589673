"""All tests marked `gpu`, in processes side by side, with the outcome of each as JSON. 5 to 10 minutes.

python benchmarks/gpu_tests.py --out benchmarks/results/h200-gpu-tests.json [--logs DIR]

One process holds the tests of evaluate, data, checkpoint and train together, as a long-lived process would: runs of one
process share the compiler's limits. Every other file has a process of its own, since a library may end it. Times are
those of a shared card and say only where the minutes go.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from paceline.core.environment import code_version, environment
from paceline.core.files import write_json
from paceline.core.schema import to_dict

ROOT = Path(__file__).parent.parent
TOGETHER = ("tests/evaluate", "tests/data", "tests/checkpoint", "tests/train")
OUTCOME = re.compile(r"^(tests/\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED)(?: \((.*)\))?\s*(?:\[ *\d+%\])?$")
DURATION = re.compile(r"^([\d.]+)s (call|setup|teardown) +(tests/\S+::.+)$")


def files_of_processes() -> dict[str, list[str]]:
    """The files with such tests; others may need packages that a machine with a GPU lacks."""
    tests = sorted((ROOT / "tests").rglob("test_*.py"))
    files = [str(path.relative_to(ROOT)) for path in tests if "pytest.mark.gpu" in path.read_text(encoding="utf-8")]
    together = [file for file in files if file.startswith(TOGETHER)]
    return {"together": together, **{Path(file).stem: [file] for file in files if file not in together}}


def command(files: list[str]) -> list[str]:
    words = [sys.executable, "-u", "-m", "pytest", "-m", "gpu", "-vrs", "--durations=0", "--durations-min=0.5"]
    return [*words, "-p", "no:cacheprovider", *files]


def outcomes(log: str) -> tuple[dict[str, str], dict[str, float]]:
    """What became of each test, and its seconds where they were half a second or more."""
    found = {match[1]: match[2].lower() for line in log.splitlines() if (match := OUTCOME.match(line))}
    seconds: dict[str, float] = {}
    for line in log.splitlines():
        if match := DURATION.match(line):
            seconds[match[3]] = round(seconds.get(match[3], 0.0) + float(match[1]), 1)
    return found, seconds


def run(name: str, files: list[str], logs: Path, ends_at: float) -> dict[str, Any]:
    """One process. What it has said is kept also where it is ended or ends itself."""
    began = time.perf_counter()
    with open(logs / f"{name}.log", "w", encoding="utf-8") as log:
        extra = {"OMP_NUM_THREADS": "4", "PYTHONUNBUFFERED": "1"}
        process = subprocess.Popen(command(files), cwd=ROOT, stdout=log, stderr=log, env=os.environ | extra)
        try:
            process.wait(max(1.0, ends_at - began))
        except subprocess.TimeoutExpired:
            process.kill()
    found, seconds = outcomes((logs / f"{name}.log").read_text(encoding="utf-8", errors="replace"))
    whole = {"files": files, "exit": process.wait(), "seconds": round(time.perf_counter() - began, 1)}
    print(f"{name}: {whole} {dict(Counter(found.values()))}", flush=True)
    return whole | {"tests": {test: {"outcome": what, "seconds": seconds.get(test)} for test, what in found.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--logs", type=Path, default=Path("."), help="folder for the whole output of each process")
    parser.add_argument("--limit-s", type=float, default=3600.0, help="end what runs longer, and keep what it has said")
    parser.add_argument("--jobs", type=int, default=4, help="processes at a time")
    parser.add_argument("--only", nargs="*", help="names of processes, as a result has them; all without it")
    parser.add_argument("--commit", help="of the code, where git cannot tell")
    arguments = parser.parse_args()
    ends_at = time.perf_counter() + arguments.limit_s
    arguments.logs.mkdir(parents=True, exist_ok=True)
    chosen = {name: files for name, files in files_of_processes().items() if name in (arguments.only or [name])}
    with ThreadPoolExecutor(arguments.jobs) as pool:
        waiting = {name: pool.submit(run, name, files, arguments.logs, ends_at) for name, files in chosen.items()}
        processes = {name: future.result() for name, future in waiting.items()}
    tests = {test: what for each in processes.values() for test, what in each.pop("tests").items()}
    result = {
        "what": (__doc__ or "").splitlines()[0],
        "command": "python benchmarks/gpu_tests.py" + (f" --only {' '.join(arguments.only)}" if arguments.only else ""),
        "date": datetime.now(UTC).date().isoformat(),
        "code": to_dict(code_version()) | ({"commit": arguments.commit} if arguments.commit else {}),
        "environment": environment(),
        "counts": dict(Counter(test["outcome"] for test in tests.values())),
        "processes": processes,
        "tests": tests,
    }
    write_json(arguments.out, result)
    for test, what in tests.items():
        if what["outcome"] in ("failed", "error"):
            print(f"{what['outcome']}: {test}")


if __name__ == "__main__":
    main()
