"""All tests marked `gpu`, in a few processes side by side, with the outcome of each as JSON. About 5 minutes.

python benchmarks/gpu_tests.py --out benchmarks/results/h200-gpu-tests.json [--logs DIR]

The first process holds the tests of evaluate, data, checkpoint and train together, as a long-lived process would: runs
of one process share the compiler's limits. Times are those of a shared card and say only where the minutes go.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from paceline.core.environment import code_version, environment
from paceline.core.files import write_json
from paceline.core.schema import to_dict

ROOT = Path(__file__).parent.parent
PROCESSES = {
    "runs": ("tests/evaluate", "tests/data", "tests/checkpoint", "tests/train"),
    "attention": ("tests/kernels/test_attention_async_gpu.py", "tests/kernels/test_attention_ranges_gpu.py"),
    "kernels": ("tests/kernels", "tests/optim"),
    "rest": ("tests/model", "tests/parallel", "tests/commands"),
}
"""Folders and files by process; a file that is named belongs to no folder."""
OUTCOME = re.compile(r"^(tests/\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED)(?: \((.*)\))?\s*(?:\[ *\d+%\])?$")
DURATION = re.compile(r"^([\d.]+)s (call|setup|teardown) +(tests/\S+::.+)$")


def files_of_processes() -> dict[str, list[str]]:
    """The files with such tests; others may need packages that a machine with a GPU lacks."""
    files = [
        path for path in sorted((ROOT / "tests").rglob("test_*.py")) if "pytest.mark.gpu" in path.read_text("utf-8")
    ]
    left, found = [str(path.relative_to(ROOT)) for path in files], dict[str, list[str]]()
    for name, places in sorted(PROCESSES.items(), key=lambda item: not item[1][0].endswith(".py")):
        found[name] = [file for file in left if file.startswith(places)]
        left = [file for file in left if file not in found[name]]
    assert not left, f"no process has {left}"
    return found


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--logs", type=Path, default=Path("."), help="folder for the whole output of each process")
    parser.add_argument("--limit-s", type=float, default=3600.0, help="end what runs longer, and keep what it has said")
    parser.add_argument("--commit", help="of the code, where git cannot tell")
    arguments = parser.parse_args()
    began, running = time.perf_counter(), {}
    threads = str(max(1, (os.cpu_count() or 1) // len(PROCESSES)))
    for name, files in files_of_processes().items():
        with open(arguments.logs / f"{name}.log", "w", encoding="utf-8") as log:
            extra = {"OMP_NUM_THREADS": threads, "PYTHONUNBUFFERED": "1"}
            running[name] = subprocess.Popen(
                command(files), cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env=os.environ | extra
            )
    processes: dict[str, Any] = {}
    tests: dict[str, Any] = {}
    for name, process in running.items():
        try:
            process.wait(max(1.0, arguments.limit_s - (time.perf_counter() - began)))
        except subprocess.TimeoutExpired:
            process.kill()
        found, seconds = outcomes((arguments.logs / f"{name}.log").read_text(encoding="utf-8", errors="replace"))
        done = round(time.perf_counter() - began, 1)
        counts = Counter(found.values())
        processes[name] = {"places": PROCESSES[name], "exit": process.wait(), "seconds": done, **counts}
        tests |= {test: {"outcome": what, "seconds": seconds.get(test)} for test, what in found.items()}
        print(f"{name}: exit {process.returncode}, {dict(counts)}, at {done} s", flush=True)
    result = {
        "what": (__doc__ or "").splitlines()[0],
        "command": "python benchmarks/gpu_tests.py",
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
