"""`paceline bench`. torch is imported only once something is measured."""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.commands.train import base_config
from paceline.core.command_line import Bare, Positional, parse
from paceline.core.errors import ConfigError
from paceline.core.files import write_json
from paceline.recipes.presets import preset
from paceline.train.config import RunConfig

STEP_HELP = """Measure a preset's training step: seconds over its schedule, memory, start, and where the time goes.

example: paceline bench step r18-softcap --steps 266 --data.dir data/fineweb10B --out step.json

Only the profile: --no-times --no-start. Flags of `paceline train` change the preset."""


@dataclass(frozen=True, kw_only=True)
class StepArgs:
    preset: Positional[str] = "demo"
    """Which preset; `paceline presets` lists them."""
    scale: str = "1"
    """Shrink width, head width, vocabulary, batch and steps together: a number in (0, 1], or 1/16."""
    points: int = 8
    """Windows of the schedule to measure at, at most."""
    repeats: int = 3
    """Steps at each of them."""
    times: bool = True
    """Measure step times and memory."""
    profile: bool = True
    """Profile two steps: shares by class and the longest kernels."""
    trace: str | None = None
    """Keep the profiler's trace in this file, for Perfetto; compressed if it ends in .gz."""
    json: bool = False
    """For programs."""
    out: str | None = None
    """Write the JSON to this file, too."""
    config: Bare[RunConfig]

    def __post_init__(self) -> None:
        if self.points < 1:
            raise ConfigError(f"--points {self.points} must be at least 1; 8 follow a growing window well")
        if self.repeats < 1:
            raise ConfigError(f"--repeats {self.repeats} must be at least 1; 3 show the spread")
        if self.trace is not None and not self.profile:
            raise ConfigError(f"--trace {self.trace} needs the profile; leave out --no-profile")


def step(argv: Sequence[str]) -> int:
    base = base_config(argv)
    defaults = StepArgs(preset=base.preset, config=base)
    arguments = parse(StepArgs, argv, verb="bench step", description=STEP_HELP, default=defaults)
    _check_preset(arguments.preset, base, "bench step")
    from paceline.lab.bench.show import step_table

    result = _measure_step(arguments, ["paceline", "bench", "step", *argv])
    if arguments.out is not None:
        write_json(Path(arguments.out), result)
    if arguments.json:
        print(json.dumps(result, indent=1))
    else:
        step_table(result)
    return 0


def _check_preset(given: str, base: RunConfig, verb: str) -> None:
    if given != base.preset:
        raise ConfigError(f"the preset {given} goes first: paceline {verb} {given} --flags")


def _measure_step(arguments: StepArgs, command: list[str]) -> dict[str, Any]:
    from paceline.lab.bench.matmul import measured_peak
    from paceline.lab.bench.result import provenance
    from paceline.lab.bench.step_result import figures_of_profile, figures_of_times
    from paceline.lab.bench.steps import Steps

    with tempfile.TemporaryDirectory() as folder:
        steps = Steps(arguments.config, Path(folder))
        peak = measured_peak(steps.device)
        steps.warm_up()
        times = steps.times(points=arguments.points, repeats=arguments.repeats) if arguments.times else None
        trace = None if arguments.trace is None else Path(arguments.trace)
        profile = steps.profile(trace) if arguments.profile else None
    return {
        "preset": arguments.preset,
        "scale": arguments.scale,
        **figures_of_times(steps.config, times, peak),
        **figures_of_profile(profile, steps.sizes()),
        "notes": list(steps.notes),
        **provenance(command, preset=preset(arguments.preset), config=arguments.config),
    }
