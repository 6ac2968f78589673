"""A page about 200 runs of 2,000 steps is made in time, is small, and a browser draws it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "report_pages.py"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_200_runs_of_2000_steps_take_under_10_s_and_10_mb(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    done = subprocess.run([sys.executable, str(BENCHMARK), "--out", str(out)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert all(page["megabytes"] < 10 for page in json.loads(out.read_text())["pages"].values())


def test_ten_short_runs_are_the_quick_sample_of_it(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    command = [sys.executable, str(BENCHMARK), "--out", str(out), "--runs", "10", "--steps", "125", "--no-draw"]
    subprocess.run(command, check=True, capture_output=True)
    result = json.loads(out.read_text())
    assert result["met"]
    assert result["pages"].keys() == {"groups of like runs", "all different"}
