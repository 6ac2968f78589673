"""Training runs in processes of their own, several at a time, for the series in this folder."""

import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from paceline.metrics.card import RunCard, read_card
from paceline.metrics.metrics_file import read_metrics

SHOWN_LINES = 12
"""Of the log of a run that failed."""


@dataclass(frozen=True)
class Run:
    """What a finished or stopped run left behind; its checkpoints are gone."""

    card: RunCard
    train_losses: tuple[float, ...]
    """Of every recorded step."""


def train(words: Sequence[str], folder: Path) -> Run:
    """`paceline train` with these words, in `folder`, beside which its log lies."""
    command = [sys.executable, "-m", "paceline.cli", "train", *words, "--no-finish", "--out", str(folder)]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_suffix(".log"), "w", encoding="utf-8") as log:
        done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False)
    if done.returncode:  # the folder may be a temporary one: what the log ends with is said here
        said = folder.with_suffix(".log").read_text(encoding="utf-8").strip().splitlines()[-SHOWN_LINES:]
        raise SystemExit("\n".join([f"{' '.join(command)}: ended with {done.returncode}:", *said]))
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # some gigabytes at full size
    steps, _ = read_metrics(folder)
    return Run(read_card(folder), tuple(step.train_loss for step in steps if step.train_loss is not None))


def train_all(runs: Mapping[str, Sequence[str]], folder: Path, *, jobs: int) -> dict[str, Run]:
    """Every named run, `jobs` at a time, begun in this order. For figures that do not depend on time."""
    with ThreadPoolExecutor(jobs) as pool:
        waiting = {name: pool.submit(train, words, folder / name) for name, words in runs.items()}
        return {name: run.result() for name, run in waiting.items()}
