"""Full-size runs of a preset on one GPU, by the rules of the en-140M track: loss, and a clock that counts every step.

python benchmarks/frontier.py frontier-60 --seeds 0 1 2 --out benchmarks/results/h200-frontier-60.json -- --data.dir D

`train_s` is the train clock of the run, and the untimed first steps at the mean of the timed steps of their stage.
Words after `--` go to `paceline train`. Runs follow each other. `--also NAME WORD ...`, repeatable, runs the preset
once more with further words, to measure one change; they are written with + for --, as +model.smear, and @FILE stands
for a config file in the place of the preset.
"""

import argparse
import sys
import tempfile
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from runs import train

from paceline.core.environment import code_version, environment
from paceline.core.files import write_json
from paceline.core.schema import read_json, to_dict
from paceline.lab.bench.gemm import measured_peak
from paceline.metrics.metrics_file import StepMetrics, read_metrics
from paceline.parallel.machine import inspect_machine
from paceline.recipes.presets import preset
from paceline.settings.run import RunConfig, read_config
from paceline.settings.schedule import stage_starts


def charged_s(steps: list[StepMetrics], train_s: float, untimed: int, stage_end: int) -> float:
    """Every step, the untimed ones at the mean of those of the first stage that were timed."""
    timed = [step for step in steps if untimed < step.step <= stage_end]
    if len(timed) < 2:
        raise SystemExit(
            f"the first stage ends at step {stage_end}, with {untimed} untimed: no step to charge those by"
        )
    one = (timed[-1].train_s - timed[0].train_s) / (len(timed) - 1)
    return train_s + untimed * one


def measured(name: str, words: list[str], seed: int, folder: Path) -> dict[str, Any]:
    files = [word for word in words if word.startswith("@")]
    words = [word for word in words if word not in files]
    given = [
        *(["--config", files[0][1:]] if files else [name]),
        *words,
        "--seed",
        str(seed),
        "--evaluate.every",
        "None",
    ]
    run, (steps, _) = train(given, folder), read_metrics(folder)
    card, config = run.card, read_config(read_json(folder / "config.json"))
    train_s = charged_s(steps, card.train_s, config.train.untimed_steps, stage_starts(config)[1])
    found = {
        "preset": name,
        "seed": seed,
        "train_s": round(train_s, 2),
        "wall_s": round(card.wall_s, 1),
        "val_loss": card.val_loss,
        "tokens": card.tokens,
        "tokens_per_s": round(card.tokens / train_s),
        "peak_gib": round((card.peak_bytes or 0) / 2**30, 2),
        "startup_s": round((card.startup_s or 0.0) + (card.first_steps_s or 0.0), 1),
        "command": f"paceline train {' '.join(given)}",
    }
    curve = {str(step.step): step.train_loss for step in steps if step.step % 50 == 0}
    print({key: value for key, value in found.items() if key != "command"}, words, flush=True)
    return found | {"steps": card.steps, "train_loss": curve, "by_stage_s": by_stage(steps, config)}


def by_stage(steps: list[StepMetrics], config: RunConfig) -> list[float]:
    """Mean seconds of a step of each stage, its first one apart."""
    at = {step.step: step.train_s for step in steps}
    pairs = ((max(start + 1, config.train.untimed_steps + 1), end) for start, end in pairwise(stage_starts(config)))
    return [round((at[end] - at[start]) / max(1, end - start), 5) for start, end in pairs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--also", nargs="+", action="append", default=[], help="a name, then words of one more run")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", help="of the code, where git cannot tell")
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    arguments, words = parser.parse_args(sys.argv[1:split]), sys.argv[split + 1 :]
    wanted: list[tuple[str, list[str], int]] = [(f"seed {seed}", [], seed) for seed in arguments.seeds]
    wanted += [(name, [word.replace("+", "--", 1) for word in more], 0) for name, *more in arguments.also]
    result: dict[str, Any] = {
        "what": (__doc__ or "").splitlines()[0],
        "date": datetime.now(UTC).date().isoformat(),
        "code": to_dict(code_version()) | ({"commit": arguments.commit} if arguments.commit else {}),
        "environment": environment(),
        "matmul_tflops": round(measured_peak(inspect_machine(preset("demo"))[1]) / 1e12, 1),
        "runs": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, more, seed) in enumerate(wanted):
            result["runs"][name] = measured(arguments.preset, [*words, *more], seed, Path(folder) / str(number))
            write_json(arguments.out, result)


if __name__ == "__main__":
    main()
