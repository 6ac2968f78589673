"""How long a page about many runs takes to make, how large it is, and how long a browser takes to draw it.

python benchmarks/report_pages.py --out benchmarks/results/report-pages.json [--runs 200] [--steps 2000]

The runs are made by formula, in the shape that training leaves: once in groups of ten seeds, once all different.
Chromium draws the page if playwright and a browser are there.
"""

import argparse
import functools
import json
import math
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from paceline.core.environment import code_version, environment
from paceline.core.files import write_json
from paceline.core.schema import to_dict
from paceline.metrics.card import RunCard, card_diff, write_card
from paceline.metrics.metrics_file import METRICS_FILE, EvalMetrics, StepMetrics
from paceline.metrics.sinks import JsonlSink
from paceline.recipes.presets import preset

TARGETS = {"make_s": 10.0, "megabytes": 10.0}
"""Upper limits for 200 runs of 2,000 steps."""
SEEDS = 10
"""Of each group of like runs."""
EVAL_EVERY = 125
STEP_S, EVAL_S = 0.17, 1.4

version, machine = functools.cache(code_version), functools.cache(environment)
"""Asked for every card, and the same in all of them."""


def write_run(folder: Path, *, steps: int, seed: int, softcap: float) -> None:
    """A run of the demo preset with a curve that falls and is noisy."""
    demo = replace(preset("demo"), steps=steps)
    config = replace(demo, seed=seed, model=replace(demo.model, softcap=softcap))
    sink, noise, evals = JsonlSink(folder / METRICS_FILE), random.Random(1000 * softcap + seed), []
    shift = noise.gauss(0, 0.01)
    for step in range(steps + 1):
        loss = 3.2 + shift + 2.2 * math.exp(-step / (0.05 * steps)) + 1.9 * math.exp(-step / (0.6 * steps))
        clocks = {"tokens": step * config.batch.tokens, "train_s": step * STEP_S, "wall_s": 4 + step * STEP_S}
        if step:
            rate, noisy = config.batch.tokens / STEP_S * noise.uniform(0.97, 1.03), loss + noise.gauss(0, 0.12)
            window = config.model.window.tokens_at(step - 1, steps)
            sink.write(StepMetrics(step=step, train_loss=noisy, lr_scale=1 - step / steps, window_tokens=window,
                                 tokens_per_s=rate, **clocks))  # fmt: skip
        if step % EVAL_EVERY == 0:
            evals.append(EvalMetrics(step=step, val_loss=loss, val_bpb=loss / 1.9, **clocks))
            sink.write(evals[-1])
    sink.close()
    write_json(folder / "config.json", to_dict(config))
    last, now = evals[-1], datetime.now(UTC).isoformat(timespec="seconds")
    card = RunCard(
        name=folder.name, preset="demo", track=None, seed=seed, finished=True, steps=steps, steps_done=steps,
        tokens=last.tokens, parameters=1_574_932, val_loss=last.val_loss, val_bpb=last.val_bpb, train_s=last.train_s,
        wall_s=last.wall_s + len(evals) * EVAL_S, startup_s=4.0, first_steps_s=10 * STEP_S,
        tokens_per_s=config.batch.tokens / STEP_S, device="cpu", peak_bytes=812_345_678, data_fingerprint="made-up",
        diff=card_diff(demo, config), code_version=version(), environment=machine(), started=now, ended=now,
        losses=tuple((e.step, e.val_loss, e.val_bpb, e.train_s, e.wall_s) for e in evals), sample="A sample. " * 30,
    )  # fmt: skip
    write_card(folder, card)


def make_page(folders: list[Path], out: Path) -> dict[str, float]:
    """From the command's launch to its exit. Where other work was going on, processor time says more than the clock."""
    load, started, cpu_before = os.getloadavg()[0], time.perf_counter(), _children_cpu_s()
    words = [sys.executable, "-m", "paceline.cli", "report", *map(str, folders), "--out", str(out)]
    subprocess.run(words, check=True, stdout=sys.stderr)
    return {
        "load_before": round(load, 2),
        "make_s": round(time.perf_counter() - started, 2),
        "make_cpu_s": round(_children_cpu_s() - cpu_before, 2),
        "megabytes": round(out.stat().st_size / 1e6, 2),
    }


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def draw_page(path: Path) -> dict[str, float | None]:
    """Seconds from opening the file until the loss curves are there, in headless Chromium."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return {"draw_s": None}
    if (chromium := shutil.which("chromium")) is None:
        return {"draw_s": None}
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--headless", "--no-sandbox"])
        page = browser.new_page()
        started = time.perf_counter()
        page.goto(path.resolve().as_uri())
        page.wait_for_selector("#loss .main-svg")
        drawn_s = time.perf_counter() - started
        browser.close()
    return {"draw_s": round(drawn_s, 2)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--no-draw", action="store_true", help="without a browser")
    arguments = parser.parse_args()
    pages = {}
    with tempfile.TemporaryDirectory() as temporary:
        for name, groups in {"groups of like runs": arguments.runs // SEEDS, "all different": arguments.runs}.items():
            folders = [Path(temporary) / name / f"run-{number:03d}" for number in range(arguments.runs)]
            for number, folder in enumerate(folders):
                write_run(folder, steps=arguments.steps, seed=number // groups, softcap=10.0 + number % groups)
            page = Path(temporary) / f"{name}.html"
            pages[name] = {**make_page(folders, page), **({} if arguments.no_draw else draw_page(page))}
            shutil.rmtree(Path(temporary) / name)
    met = all(page[name] <= limit for page in pages.values() for name, limit in TARGETS.items())
    result = {
        "what": f"paceline report about {arguments.runs} runs of {arguments.steps:,} steps, from launch to exit",
        "date": datetime.now(UTC).date().isoformat(),
        "code": to_dict(version()),
        "environment": machine(),
        "targets": TARGETS,
        "met": met,
        "pages": pages,
    }
    write_json(arguments.out, result)
    print(json.dumps(result, indent=1))
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
