"""The notebook of examples/, run as it is: how long that takes, and what readers see of it on a page.

python benchmarks/notebook.py --out benchmarks/results/notebook-cpu.json

Its outputs are written back into the notebook: text as it was printed, each chart as a picture, because pages that show
notebooks draw no charts and the numbers of one are longer than its picture. Needs playwright and chromium.
"""

import argparse
import json
import os
import resource
import shutil
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from playwright.sync_api import sync_playwright
from plotly.offline import get_plotlyjs

from paceline.core.environment import code_version, environment
from paceline.core.files import write_json
from paceline.core.schema import to_dict

NOTEBOOK = Path(__file__).parents[1] / "examples" / "from-text-to-an-ablation.ipynb"
CHART = "application/vnd.plotly.v1+json"
LIMIT_S = 600.0
"""From the start of the kernel to the last cell's end, on 2 CPU cores."""


def timed_run(notebook: Any) -> dict[str, float]:
    """Run every cell in an empty folder. The processor's seconds are those of the kernel and of all runs it started."""
    used = cpu_seconds()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(
            notebook,
            timeout=3600,
            record_timing=False,
            coalesce_streams=True,
            resources={"metadata": {"path": folder}},
        ).execute()
    return {"wall_s": round(time.perf_counter() - started, 1), "cpu_s": round(cpu_seconds() - used, 1)}


def cpu_seconds() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return children.ru_utime + children.ru_stime


def draw_charts(notebook: Any) -> None:
    """Put a picture in place of each chart."""
    charts = [
        output
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if output.output_type == "display_data" and CHART in output.data
    ]
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page()
        page.add_script_tag(content=get_plotlyjs())
        for output in charts:
            chart = output.data[CHART]
            size = {name: chart["layout"][name] for name in ("width", "height")}
            picture = page.evaluate(
                "([chart, size]) => Plotly.toImage(chart, {format: 'png', ...size})", [dict(chart), size]
            )
            title = chart["layout"]["title"]["text"]
            output.data = {"image/png": picture.partition(",")[2], "text/plain": title}
        browser.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    about = dict(notebook.metadata)
    code, load_before = to_dict(code_version()), os.getloadavg()[0]
    took = timed_run(notebook)
    draw_charts(notebook)
    notebook.metadata = about  # without the versions of the kernel that it ran in
    nbformat.write(notebook, NOTEBOOK)
    result = {
        "what": "examples/from-text-to-an-ablation.ipynb as it is, from the start of its kernel to its last cell",
        "date": datetime.now(UTC).date().isoformat(),
        "code": code,
        "environment": environment(),
        "load_before": round(load_before, 2),
        "limit_s": LIMIT_S,
        "met": took["wall_s"] <= LIMIT_S,
        **took,
    }
    write_json(arguments.out, result)
    print(json.dumps(result, indent=1))
    return 0 if result["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
