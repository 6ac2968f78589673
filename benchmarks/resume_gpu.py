"""What a checkpoint costs on a GPU, and whether a run that was killed is the run that was not. One command, 3 to 4 min.

python benchmarks/resume_gpu.py --out benchmarks/results/h200-resume.json [--only kill|figures] [--data DIR]

`kill`: record 18, 38 steps under --train.deterministic, once undisturbed and once killed with -9 at a random step and
resumed; losses and last weights are compared bit for bit. `figures`, in this process and without that flag: how long a
save holds up the training, and what it costs the steps beside which it is written; how long resuming takes after
imports, CUDA's start and compilation; what the guard against bad numbers costs. Without --data, shards of random tokens
with the frequencies of text are made. Needs torch, numpy, safetensors, rich, tyro. `--device cpu --scale 1/16` tries it
out.
"""

import argparse
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline.checkpoint import store
from paceline.checkpoint.run_folder import RunFolder
from paceline.checkpoint.save import Saver
from paceline.core.environment import code_version, environment
from paceline.core.files import write_json
from paceline.core.schema import to_dict
from paceline.lab.bench.steps import Steps
from paceline.metrics.card import read_card
from paceline.metrics.metrics_file import read_metrics
from paceline.parallel.machine import inspect_machine
from paceline.recipes.presets import preset
from paceline.recipes.scaling import parse_scale, scaled, with_steps
from paceline.settings.run import BadStepsConfig, RunConfig
from paceline.text.shard_writer import write_shard

STEPS, EVERY = 38, 6
AIMS = {"save_stall_s": 0.3, "resume_s": 10.0, "guard_share": 0.005}
BLOCKS, STEPS_PER_BLOCK = 5, 4
"""Steps are timed in blocks, guarded and unguarded in turn."""


def write_data(folder: Path, config: RunConfig) -> Path:
    """Shards with the frequencies of text: a few tokens make up much of it, which long sums of gradients notice."""
    generator = np.random.Generator(np.random.PCG64(0))
    for name, steps in (("x_train_000001.bin", STEPS + 2), ("x_val_000000.bin", 2)):
        ranks = generator.zipf(1.2, size=steps * config.batch.tokens) % config.model.vocab_size
        write_shard(folder / name, ranks.astype(np.uint16), documents=1, tokenizer="none")
    return folder


def base(arguments: argparse.Namespace) -> RunConfig:
    config = with_steps(scaled(preset("r18-softcap"), parse_scale(arguments.scale)), STEPS)
    return replace(config, train=replace(config.train, device=arguments.device))


# ---- a killed run against an undisturbed one


def command(arguments: argparse.Namespace, data: Path, run: Path) -> list[str]:
    flags = {
        "scale": arguments.scale, "steps": STEPS, "out": run, "data.dir": data, "train.device": arguments.device,
        "evaluate.every": None, "evaluate.tokens": base(arguments).batch.sequence_tokens, "checkpoint.every": EVERY,
    }  # fmt: skip
    if arguments.micro_tokens is not None:
        flags["batch.micro-tokens"] = arguments.micro_tokens
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    start = [sys.executable, "-m", "paceline.cli", "train"]
    if (run / "config.json").exists():
        return [*start, "--resume", str(run), "--no-finish"]
    return [*start, "r18-softcap", *words, "--train.deterministic", "--no-finish"]


def killed_at(step: int, words: list[str], run: Path) -> int:
    """Start a run, kill it as soon as this many steps are recorded; how many there were by then."""
    process = subprocess.Popen(words, stdout=sys.stderr)
    metrics = run / "metrics.jsonl"
    while process.poll() is None and (not metrics.exists() or metrics.read_bytes().count(b'"step", ') < step):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    return len(read_metrics(run)[0])


def kill(arguments: argparse.Namespace, data: Path, folder: Path) -> dict[str, Any]:
    whole, cut = folder / "whole", folder / "cut"
    undisturbed = subprocess.Popen(command(arguments, data, whole), stdout=sys.stderr)  # beside it: no figure is a time
    step = random.Random(arguments.seed).randint(EVERY + 2, STEPS - 4)
    killed = killed_at(step, command(arguments, data, cut), cut)
    assert not read_card(cut).finished, "it was finished before it could be killed"
    subprocess.run(command(arguments, data, cut), check=True, stdout=sys.stderr)
    assert undisturbed.wait() == 0, "the undisturbed run failed"
    losses = {run.name: [record.train_loss for record in read_metrics(run)[0]] for run in (whole, cut)}
    weights = {
        run.name: store.load(RunFolder(run).checkpoints()[-1], without=("optimizer",)).model for run in (whole, cut)
    }
    differing = [n for n, tensor in weights["whole"].items() if not torch.equal(tensor, weights["cut"][n])]
    return {
        "killed_at_step": killed,
        "resumed_from": next(note for note in read_card(cut).notes if note.startswith("resumed from")),
        "losses_equal": losses["whole"] == losses["cut"],
        "first_differing_step": next((i + 1 for i, (a, b) in enumerate(zip(*losses.values())) if a != b), None),  # noqa: B905
        "largest_difference": max(abs((a or 0) - (b or 0)) for a, b in zip(*losses.values())),  # noqa: B905
        "weights_differing": differing,
        "losses": [float(loss).hex() for loss in losses["whole"] if loss is not None],
    }


# ---- figures


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds(work: Callable[[], object]) -> float:
    wait()
    began = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - began


def step_s(steps: Steps, number: int = STEPS_PER_BLOCK) -> float:
    return seconds(lambda: [steps._take(STEPS // 2) for _ in range(number)]) / number


def guard_cost(steps: Steps) -> dict[str, Any]:
    """Medians over blocks, guarded and not in turn."""
    run, times = steps.run, {True: list[float](), False: list[float]()}
    for block in range(2 * BLOCKS):
        guarded = block % 2 == 0
        steps.step.run = replace(run, config=replace(run.config, bad_steps=BadStepsConfig(skip=guarded)))
        times[guarded].append(step_s(steps))
    plain = statistics.median(times[False])
    return {"step_s": plain, "guard_share": statistics.median(times[True]) / plain - 1, "blocks_s": times[True]}


def save_cost(steps: Steps, folder: Path, plain_s: float) -> dict[str, Any]:
    """Three saves: how long each holds up the loop, how long it is written, and the steps beside it."""
    run, rows, config = steps.run, list[dict[str, float]](), to_dict(steps.config)
    saver = Saver(RunFolder(folder), keep=steps.config.checkpoint.keep)

    def save(number: int) -> None:
        """What a run's own checkpoints hold, but for the small groups."""
        groups = {"model": dict(run.model.named_parameters()), "optimizer": run.optimizer.state_dict(copied=False)}
        saver.save(store.Checkpoint(number, groups, state={}, config=config))

    for number in range(1, 4):
        stall = seconds(lambda number=number: save(number))
        began, beside = time.perf_counter(), list[float]()
        while saver._pending is not None and not saver._pending.done():
            beside.append(step_s(steps, 1))
        saver.wait()
        written = time.perf_counter() - began
        slower = (statistics.mean(beside) / plain_s - 1) if beside else 0.0
        rows.append({"stall_s": stall, "written_s": written, "steps_beside": len(beside), "slower_share": slower})
    return {"saves": rows, "save_stall_s": max(row["stall_s"] for row in rows[1:])}


def resume_cost(steps: Steps, folder: Path) -> dict[str, Any]:
    """Verifying and loading the newest checkpoint into a run that is assembled."""
    run, assembled = RunFolder(folder), steps.run
    verify_s = seconds(lambda: store.newest_good(run))
    newest = run.checkpoints()[-1]

    def load() -> None:
        store.load_weights_into(newest, dict(assembled.model.named_parameters()))
        assembled.optimizer.load_state_dict(store.load(newest, without=("model",)).groups["optimizer"])

    load_s = seconds(load)
    size = sum(path.stat().st_size for path in newest.iterdir())
    return {"checkpoint_bytes": size, "verify_s": verify_s, "load_s": load_s, "resume_s": verify_s + load_s}


def figures(arguments: argparse.Namespace, data: Path, folder: Path) -> dict[str, Any]:
    config = base(arguments)
    folder.mkdir()
    steps = Steps(*inspect_machine(replace(config, data=replace(config.data, dir=str(data)))))
    steps.warm_up()
    guard = guard_cost(steps)
    return {**guard, **save_cost(steps, folder, guard["step_s"]), **resume_cost(steps, folder)}


def show(result: dict[str, Any]) -> None:
    for name, value in result.items():
        for key, found in value.items() if isinstance(value, dict) and name in ("kill", "figures") else ():
            if isinstance(found, bool | int | float | str | None):
                aim = f"  (aim: below {AIMS[key]})" if key in AIMS else ""
                print(f"{key:>24}  {found:.4g}{aim}" if isinstance(found, float) else f"{key:>24}  {found}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", choices=["kill", "figures"])
    parser.add_argument("--data", type=Path)
    parser.add_argument("--scale", default="1")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--micro-tokens", type=int, help="for `kill`, whose two runs share the GPU")
    arguments = parser.parse_args()
    began = time.perf_counter()
    result: dict[str, Any] = {
        "what": "r18-softcap: killed and resumed under --train.deterministic; cost of saves, resuming and guard",
        "scale": arguments.scale,
        "aims": AIMS,
        "date": datetime.now(UTC).date().isoformat(),
        "code": to_dict(code_version()),
        "environment": environment(),
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = arguments.data or write_data(folder / "data", base(arguments))
        for part, work in (("kill", kill), ("figures", figures)):
            if arguments.only in (None, part):
                result[part] = work(arguments, data, folder / part)
                result["seconds"] = time.perf_counter() - began
                write_json(arguments.out, result)  # after each part: the machine may be taken away
    show(result)
    return 0 if result.get("kill", {}).get("losses_equal", True) else 1


if __name__ == "__main__":
    sys.exit(main())
