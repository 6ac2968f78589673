"""Runs that are struck again and again, resumed each time, and compared with one that was left in peace."""

import multiprocessing
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from paceline.checkpoint import store
from paceline.checkpoint.run_folder import RunFolder
from paceline.metrics.metrics_file import read_metrics
from paceline.text.shard_writer import write_shard
from paceline.text.tokenizer import ByteTokenizer
from parallel.launch import torchrun
from train.tiny import document
from train.victim import strike

STEPS_PER_SHARD = 7


@dataclass(frozen=True)
class Moment:
    """A call of a place of `victim.PLACES`, counted from the start of its launch."""

    place: str
    call: int


def flags(folder: Path, steps: int) -> list[str]:
    """Of a run of `paceline train demo` with shards of seven steps, a window that grows several times, validations and
    checkpoints in between."""
    write_shards(folder / "data", steps)
    given = {
        "steps": steps, "model.vocab-size": 257, "model.width": 16, "model.num-layers": 2, "model.num-heads": 1,
        "model.head-dim": 16, "model.window.growth-tokens": 1024, "data.tokenizer": "bytes", "data.end-of-text": 256,
        "data.dir": folder / "data", "data.order": "sequential", "batch.sequence-tokens": 128, "batch.tokens": 512,
        "batch.micro-tokens": 256, "evaluate.every": 6, "evaluate.tokens": 512, "checkpoint.every": 5,
        "train.device": "cpu", "train.threads": 1,
    }  # fmt: skip
    return [str(word) for name, value in given.items() for word in (f"--{name}", value)]


def write_shards(folder: Path, steps: int) -> None:
    tokenizer, generator = ByteTokenizer(), np.random.Generator(np.random.PCG64(0))
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(folder)
    for number in range(-(-steps // STEPS_PER_SHARD) + 1):
        tokens = np.concatenate([document(generator) for _ in range(40)])[: 512 * STEPS_PER_SHARD + 100]
        name = f"x_train_{number:06d}.bin" if number else "x_val_000000.bin"
        write_shard(folder / name, tokens, documents=40, tokenizer=tokenizer.fingerprint)


def train(folder: Path, name: str, steps: int) -> list[str]:
    """The words that begin or continue the run `name`."""
    if (folder / name / "config.json").exists():
        return ["train", "--resume", str(folder / name), "--no-finish"]
    return ["train", "demo", "--out", str(folder / name), "--no-finish", *flags(folder, steps)]


def left_by(run: Path) -> dict[str, Any]:
    """The loss curve and the last state of a run, to be compared bit for bit."""
    steps, evaluations = read_metrics(run)
    newest, passed_over = store.newest_good(RunFolder(run))
    assert passed_over == []
    state = store.load(newest)
    return {
        "steps": [(record.step, record.train_loss, record.window_tokens) for record in steps],
        "evaluations": [(record.step, record.val_loss) for record in evaluations],
        "tensors": {f"{group}/{n}": t for group in ("model", "optimizer") for n, t in state.groups[group].items()},
    }


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["steps"] == expected["steps"]
    assert found["evaluations"] == expected["evaluations"]
    one, other = found["tensors"], expected["tensors"]
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


# ---- launches


def in_a_fork(moment: Moment, number: int, words: list[str]) -> int:
    """A process of its own that need not import torch again; its exit code, below 0 for a signal."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["train.victim"])
    process = context.Process(target=strike, args=(moment.place, moment.call, number, words))
    with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):  # the server is told of modules only by it
        process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def as_a_command(moment: Moment, number: int, words: list[str]) -> int:
    """A command as users type it."""
    with started(moment, number, words) as process:
        try:
            process.communicate(timeout=120)
        finally:
            process.kill()  # of use after the time-out only
    return process.returncode


def started(moment: Moment, number: int, words: list[str]) -> "subprocess.Popen[bytes]":
    place = [moment.place, str(moment.call), signal.Signals(number).name]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "train.victim", *place, *words]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def by_torchrun(moment: Moment, number: int, words: list[str]) -> int:
    """Two ranks, of which one is struck; the exit code is torchrun's."""
    launcher = torchrun(2, "train.victim", moment.place, moment.call, signal.Signals(number).name, *words)
    launcher.communicate(timeout=120)
    return launcher.returncode
