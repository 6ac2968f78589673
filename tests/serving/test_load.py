"""Many streams at once for a while; `benchmarks/serve_load.py` is the whole series."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_64_streams_go_on_without_an_error_and_memory_stays(tmp_path: Path) -> None:
    run, out = tmp_path / "demo", tmp_path / "load.json"
    train = ["-m", "paceline.cli", "train", "demo", "--steps", "20", "--no-finish", "--out", str(run)]
    measure = [str(ROOT / "benchmarks" / "serve_load.py"), "--run", str(run), "--out", str(out), "--seconds", "30"]
    for words in (train, measure):
        subprocess.run([sys.executable, *words], check=False, env={**os.environ, "OMP_NUM_THREADS": "1"})
    found = json.loads(out.read_text())
    assert found["loaded"]["first_errors"] == []
    assert found["loaded"]["growth_mib"] <= found["targets"]["growth_mib"]
    assert sum(found["loaded"]["requests"].values()) >= 64
