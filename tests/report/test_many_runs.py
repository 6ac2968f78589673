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
    subprocess.run([sys.executable, str(BENCHMARK), "--out", str(out)], check=False, capture_output=True)
    for page in json.loads(out.read_text())["pages"].values():
        assert page["make_cpu_s"] < 10  # on a machine of its own the same as the time it takes
        assert page["megabytes"] < 10
        assert page["draw_s"] is None or page["draw_s"] < 60


def test_ten_short_runs_are_the_quick_sample_of_it(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    command = [sys.executable, str(BENCHMARK), "--out", str(out), "--runs", "10", "--steps", "125", "--no-draw"]
    subprocess.run(command, check=True, capture_output=True)
    result = json.loads(out.read_text())
    assert result["met"]
    assert result["pages"].keys() == {"groups of like runs", "all different"}
