"""Run folders as training leaves them, made by formula."""

import dataclasses
import math
import random
from pathlib import Path
from typing import Any

from paceline.core.environment import CodeVersion
from paceline.core.files import write_json
from paceline.core.schema import to_dict
from paceline.metrics.card import RunCard, card_diff, write_card
from paceline.metrics.metrics_file import METRICS_FILE, EvalMetrics, StepMetrics
from paceline.metrics.sinks import JsonlSink
from paceline.recipes.presets import preset
from paceline.settings.run import RunConfig

SAMPLE = """The following functions return the value of the object. If the argument is not a string, the method raises
a TypeError, and the result of the call is the same as that of the first:

    >>> open("file", "w").write(text)

Changed in version 3.2: the default is now a list of names."""
STEP_S, EVAL_S, LAUNCH_S = 0.17, 1.4, 4.0


def loss_at(step: int, steps: int, floor: float) -> float:
    return floor + 2.2 * math.exp(-step / (0.05 * steps)) + 1.9 * math.exp(-step / (0.6 * steps))


def write_run(
    folder: Path,
    *,
    name: str = "demo",
    steps: int = 500,
    done: int | None = None,
    seed: int = 0,
    floor: float = 3.2,
    softcap: float | None = None,
    **card_values: Any,
) -> Path:
    """A run of the demo preset; `done` short of `steps` leaves it unfinished. Without a `softcap` of its own a run has
    the preset's if its seed is 0, else 30, so that two runs differ in more than the seed."""
    demo = dataclasses.replace(preset("demo"), steps=steps)
    softcap = softcap or (30.0 if seed else demo.model.softcap)
    model = dataclasses.replace(demo.model, softcap=softcap)
    config = dataclasses.replace(demo, seed=seed, model=model)
    done = steps if done is None else done
    evals = write_metrics(folder, config, done=done, floor=floor)
    write_json(folder / "config.json", to_dict(config))
    write_card(
        folder, dataclasses.replace(card_of(name, config, done, evals), diff=card_diff(demo, config), **card_values)
    )
    return folder


def write_metrics(folder: Path, config: RunConfig, *, done: int, floor: float) -> list[EvalMetrics]:
    sink = JsonlSink(folder / METRICS_FILE)
    noise, evals, wall_s = random.Random(config.seed), [], LAUNCH_S
    for step in range(done + 1):
        loss, tokens = loss_at(step, config.steps, floor), step * config.batch.tokens
        clocks = {"tokens": tokens, "train_s": max(0, step - 10) * STEP_S, "wall_s": wall_s}
        window = config.model.window.tokens_at(max(0, step - 1), config.steps)
        if step:
            sink.write(
                StepMetrics(
                    step=step,
                    train_loss=loss + noise.gauss(0, 0.12),
                    lr_scale=min(1.0, (config.steps - step + 1) / (0.4 * config.steps)),
                    window_tokens=window,
                    tokens_per_s=(12_000 - 400 * window / 128) * noise.uniform(0.97, 1.03),
                    **clocks,
                )
            )
        if step % 100 == 0 or step == config.steps:
            evals.append(
                EvalMetrics(
                    step=step, val_loss=loss + 0.03, val_bpb=(loss + 0.03) / 1.9, window_tokens=window, **clocks
                )
            )
            sink.write(evals[-1])
            wall_s += EVAL_S
        wall_s += STEP_S
    sink.close()
    return evals


def card_of(name: str, config: RunConfig, done: int, evals: list[EvalMetrics]) -> RunCard:
    last = evals[-1]
    return RunCard(
        name=name,
        preset="demo",
        track=None,
        seed=config.seed,
        finished=done == config.steps,
        steps=config.steps,
        steps_done=done,
        tokens=done * config.batch.tokens,
        parameters=1_574_932,
        val_loss=last.val_loss,
        val_bpb=last.val_bpb,
        train_s=max(0, done - 10) * STEP_S,
        wall_s=last.wall_s + EVAL_S,
        startup_s=LAUNCH_S,
        first_steps_s=10 * STEP_S,
        tokens_per_s=config.batch.tokens / STEP_S,
        device="cpu",
        peak_bytes=812_345_678,
        data_fingerprint="6f0c2b1de1a94f77",
        code_version=CodeVersion(version="0.1.0", commit="0123456789" * 4, dirty=False),
        environment={
            "python": "3.11.7",
            "torch": "2.13.0+cpu",
            "cpu": "A processor",
            "cores": 2,
            "memory_bytes": 2**34,
        },
        started="2025-01-04T10:00:00+00:00",
        ended="2025-01-04T10:02:00+00:00" if done == config.steps else None,
        notes=("bf16 -> fp32 on this CPU",),
        losses=tuple((e.step, e.val_loss, e.val_bpb, e.train_s, e.wall_s) for e in evals),
        sample=SAMPLE if done == config.steps else None,
    )
