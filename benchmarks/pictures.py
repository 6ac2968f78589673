"""The pictures of pages in docs/images, from real runs: report in light and dark, waterfall, live page.

python benchmarks/pictures.py --ablation runs/ablate-r18-softcap [--runs runs/pictures] [--out docs/images]

Trains a small demo with Muon and with AdamW, three seeds each, to --runs, in some minutes, and looks at the live page
before the last of them is done; runs that are finished are kept. The ablation is one of `paceline ablate`. Needs
playwright and chromium.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline.core.errors import RunError
from paceline.metrics.card import read_card

STEPS = 100
SEEDS = 3
WIDTH = 960
"""Of the pictures, in pixels: wide enough for tables that are not stacked."""
COMMON = (
    "--steps", str(STEPS), "--model.width", "128", "--model.num-heads", "2", "--batch.tokens", "1024",
    "--batch.sequence-tokens", "512", "--evaluate.every", "20", "--evaluate.tokens", "8192", "--train.threads", "1",
    "--no-finish",
)  # fmt: skip
ARMS = {"muon": (), "adamw": ("--optim.matrices", "adamw")}


def train(folder: Path, words: tuple[str, ...]) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "paceline.cli", "train", "demo", *COMMON, *words, "--out", str(folder)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


def is_finished(folder: Path) -> bool:
    try:
        return read_card(folder).finished
    except RunError:
        return False


def train_all(runs: Path, look: Any) -> None:
    """One run after another; `look` is called in the middle of the last one."""
    missing = [
        (runs / f"{arm}-{seed}", (*words, "--seed", str(seed)))
        for seed in range(SEEDS)
        for arm, words in ARMS.items()
        if not is_finished(runs / f"{arm}-{seed}")
    ]
    for number, (folder, words) in enumerate(missing, start=1):
        shutil.rmtree(folder, ignore_errors=True)
        trainer = train(folder, words)
        if number == len(missing):
            look(folder / "metrics.jsonl")
        if trainer.wait():
            raise SystemExit(f"{folder}: the run failed")


@contextmanager
def watching(runs: Path) -> Iterator[str]:
    """The address of a live page about these runs."""
    command = [sys.executable, "-m", "paceline.cli", "watch", str(runs), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield server.stdout.readline().split()[0]
        server.terminate()


def picture_live_page(browser: Any, runs: Path, metrics: Path, out: Path) -> None:
    with watching(runs) as address:
        page = browser.new_page(viewport={"width": WIDTH, "height": 900})
        page.goto(address)
        while not metrics.exists() or metrics.read_bytes().count(b"\n") < STEPS // 2:
            time.sleep(0.5)
        time.sleep(2)
        picture_top(page, "#part-curves", out / "watch.png")
        page.close()


def picture_report(browser: Any, folders: list[Path], scheme: str, part: str, out: Path, *, whole: bool) -> None:
    """The page from its top to the end of a part, or that part alone."""
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary) / "page.html"
        command = [sys.executable, "-m", "paceline.cli", "report", *map(str, folders), "--out", str(file)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        page = browser.new_context(viewport={"width": WIDTH, "height": 900}, color_scheme=scheme).new_page()
        page.goto(file.as_uri())
        page.wait_for_selector("#loss .main-svg")
        if whole:
            picture_top(page, part, out)
        else:
            page.locator(part).first.screenshot(path=out)
        page.close()


def picture_top(page: Any, last_part: str, out: Path) -> None:
    page.mouse.move(0, 0)
    box = page.locator(last_part).bounding_box()
    page.screenshot(path=out, full_page=True, clip={"x": 0, "y": 0, "width": WIDTH, "height": box["y"] + box["height"]})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ablation", type=Path, required=True)
    parser.add_argument("--runs", type=Path, default=Path("runs/pictures"))
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    arguments = parser.parse_args()
    out, runs = arguments.out, arguments.runs
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        options = {"executable_path": shutil.which("chromium"), "args": ["--headless", "--no-sandbox"]}
        browser = driver.chromium.launch(**options)
        train_all(runs, lambda metrics: picture_live_page(browser, runs, metrics, out))
        folders = [runs / f"{arm}-{seed}" for arm in ARMS for seed in range(SEEDS)]
        picture_report(browser, folders, "light", "#part-curves", out / "report-light.png", whole=True)
        picture_report(browser, folders, "dark", "#part-curves", out / "report-dark.png", whole=False)
        picture_report(browser, [arguments.ablation], "light", "#waterfall-0", out / "waterfall.png", whole=False)
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
