"""`paceline bench step`, `gemm` and `sample`. torch is imported only once something is measured."""

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import tyro

from paceline.commands.train import base_config
from paceline.core.command_line import Bare, OptionalPreset, Positional, parse
from paceline.core.errors import ConfigError
from paceline.core.files import write_json
from paceline.core.schema import Change, changes
from paceline.data.config import DEFAULT_MICRO_TOKENS
from paceline.evaluate.config import SamplingConfig
from paceline.lab.bench.start import START_STEPS, compile_cache, measure_peak, measure_start
from paceline.parallel.voice import one_voice
from paceline.recipes.presets import PRESETS, preset
from paceline.recipes.scaling import parse_scale, scaled
from paceline.train.config import RunConfig

if TYPE_CHECKING:
    from paceline.parallel.ranks import Ranks
    from paceline.train.assemble import Machine

STEP_HELP = """Measure a preset's training step: seconds over its schedule, memory, start, and where the time goes.

example: paceline bench step r18-softcap --steps 266 --data.dir data/fineweb10B --out step.json

Only the profile: --no-times --no-start. Flags of `paceline train` change the preset. Behind torchrun the step is shared
by its ranks, and the result says how much of it is communication that is not hidden; a start is not measured there."""
GEMM_HELP = """Time the matrix products of a preset's step by themselves, in its own shapes.

example: paceline bench gemm r18-softcap --out gemm.json

Flags of `paceline train` change the preset."""
SAMPLE_HELP = """Measure how fast a model writes, one text and many at once: tokens a second, time to the first.

example: paceline bench sample r18-softcap --streams 1 64 --out sample.json

A preset's weights are untrained; of a run the newest checkpoint is taken. Texts are written as by `paceline serve`."""


@dataclass(frozen=True, kw_only=True)
class BenchArgs:
    preset: OptionalPreset = "demo"
    """Which preset; `paceline presets` lists them."""
    scale: str = "1"
    """Shrink width, head width, vocabulary, batch and steps together: a number in (0, 1], or 1/16."""
    json: bool = False
    """For programs."""
    out: str | None = None
    """Write the JSON to this file, too."""
    config: Bare[RunConfig]


@dataclass(frozen=True, kw_only=True)
class StepArgs(BenchArgs):
    points: int = 8
    """Windows of the schedule to measure at, at most."""
    repeats: int = 3
    """Steps at each of them."""
    times: bool = True
    """Measure step times and memory."""
    start: bool = True
    """Measure the start in processes of its own: launch to step 10 with an empty and with a filled compile cache."""
    profile: bool = True
    """Profile two steps: shares by class and the longest kernels."""
    trace: str | None = None
    """Keep the profiler's trace in this file, for Perfetto; compressed if it ends in .gz."""

    def __post_init__(self) -> None:
        if self.points < 1:
            raise ConfigError(f"--points {self.points} must be at least 1; 8 follow a growing window well")
        if self.repeats < 1:
            raise ConfigError(f"--repeats {self.repeats} must be at least 1; 3 show the spread")
        if self.trace is not None and not self.profile:
            raise ConfigError(f"--trace {self.trace} needs the profile; leave out --no-profile")


@dataclass(frozen=True, kw_only=True)
class GemmArgs(BenchArgs):
    repeats: int = 20
    """Calls of each product, of which the median counts."""

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ConfigError(f"--repeats {self.repeats} must be at least 1; 20 give a steady median")


@dataclass(frozen=True, kw_only=True)
class SampleBenchArgs:
    model: Positional[Annotated[str, tyro.conf.arg(metavar="[MODEL]")]] = "demo"
    """A preset, or a run's folder."""
    scale: str = "1"
    """Of a preset: shrink it, as in training."""
    streams: tuple[int, ...] = (1, 64)
    """Texts written at the same time, one measurement each."""
    steps: int = 128
    """Tokens of every text in one repeat."""
    repeats: int = 5
    """Of which the median counts."""
    prompt_tokens: int = 64
    """Length of every prompt, of random tokens."""
    compile: bool = True
    """On a GPU, compile the step before it is recorded."""
    sampling: Bare[SamplingConfig] = field(default_factory=SamplingConfig)
    json: bool = False
    """For programs."""
    out: str | None = None
    """Write the JSON to this file, too."""

    def __post_init__(self) -> None:
        for name in ("steps", "repeats", "prompt_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} {getattr(self, name)} must be at least 1")
        if not self.streams or min(self.streams) < 1:
            raise ConfigError(f"--streams {' '.join(map(str, self.streams))}: every number must be at least 1")


def step(argv: Sequence[str]) -> int:
    from paceline.lab.bench.show import show_step

    with one_voice():
        base = base_config(argv)
        arguments = parse_arguments(StepArgs, argv, base)
        if "LOCAL_RANK" in os.environ:  # a start is of processes of its own, which would be ranks of nothing
            arguments = replace(arguments, start=False)
        if arguments.start and arguments.config.steps < START_STEPS:
            raise ConfigError(
                f"--steps {arguments.config.steps}: a start is measured over {START_STEPS}; use more, or --no-start"
            )
        with tempfile.TemporaryDirectory() as folder:
            result = _measure_step(arguments, base, Path(folder))
    return 0 if result is None else _give(result, arguments, ["bench", "step", *argv], show_step)


def gemm(argv: Sequence[str]) -> int:
    from paceline.lab.bench.show import show_gemm

    arguments = parse_arguments(GemmArgs, argv, base_config(argv))
    from paceline.lab.bench.gemm import measure_products

    result = measure_products(arguments.config, repeats=arguments.repeats)
    return _give(result, arguments, ["bench", "gemm", *argv], show_gemm)


def sample(argv: Sequence[str]) -> int:
    from paceline.lab.bench.provenance import provenance
    from paceline.lab.bench.show import show_sample

    arguments = parse(SampleBenchArgs, argv, verb="bench sample", description=SAMPLE_HELP)
    from paceline.lab.bench.sampling import SampleCase, measure_sampling, run_to_sample, untrained

    if arguments.model in PRESETS:
        config = scaled(preset(arguments.model), parse_scale(arguments.scale))
        known = provenance(["bench", "sample", *argv], preset=preset(arguments.model), config=config)
        writer = untrained(config)
    elif arguments.scale != "1":
        raise ConfigError(f"--scale {arguments.scale} applies to presets; {arguments.model} has its size")
    else:
        writer, written = run_to_sample(arguments.model)
        known = provenance(["bench", "sample", *argv], preset=written, config=written)
    case = SampleCase(
        steps=arguments.steps,
        repeats=arguments.repeats,
        prompt_tokens=arguments.prompt_tokens,
        sampling=arguments.sampling,
        compiled=arguments.compile,
    )
    measured = measure_sampling(writer, case, arguments.streams, say=_say)
    result = {"model": arguments.model, "scale": arguments.scale, **measured, **known}
    return _print_or_write(result, arguments.out, arguments.json, show_sample)


Args = TypeVar("Args", StepArgs, GemmArgs)
HELP: dict[type, tuple[str, str]] = {StepArgs: ("bench step", STEP_HELP), GemmArgs: ("bench gemm", GEMM_HELP)}


def parse_arguments(cls: type[Args], argv: Sequence[str], base: RunConfig) -> Args:
    """The flags on top of `base`, which `base_config` made of the same words."""
    verb, text = HELP[cls]
    arguments = parse(cls, argv, verb=verb, description=text, default=cls(preset=base.preset, config=base))
    if arguments.preset != base.preset:
        raise ConfigError(f"the preset {arguments.preset} goes first: paceline {verb} {arguments.preset} --flags")
    return arguments


def _measure_step(arguments: StepArgs, base: RunConfig, folder: Path) -> dict[str, Any] | None:
    """The start comes first: what it has compiled is there for the steps, and the device is all its own. None on ranks
    that do not speak."""
    from paceline.parallel.meeting import joined
    from paceline.parallel.ranks import ranks_from_environment
    from paceline.train.assemble import inspect_machine
    from paceline.train.fit import release_memory
    from paceline.train.run import agreed_facts

    with compile_cache(folder / "cache") if arguments.start else contextlib.nullcontext():
        starts = measure_start(train_words(arguments, base), folder, say=_say) if arguments.start else {}
        ranks = ranks_from_environment()
        config, machine = inspect_machine(arguments.config, ranks)
        with joined(ranks, machine.device, agreed_facts(arguments.config), config.parallel):
            measured = _measure_here(arguments, config, machine, ranks, folder)
        if arguments.start and (measured["micro_tokens"] or 0) > DEFAULT_MICRO_TOKENS:
            release_memory()  # another process is about to ask for it
            peak = measure_peak(train_words(arguments, base), folder, DEFAULT_MICRO_TOKENS, say=_say)
            measured["peak_gib"] = None if peak is None else peak / 2**30
    return {"cold_start_s": starts.get("cold"), "warm_start_s": starts.get("warm"), **measured} if ranks.first else None


def _measure_here(
    arguments: StepArgs, config: RunConfig, machine: "Machine", ranks: "Ranks", folder: Path
) -> dict[str, Any]:
    from paceline.lab.bench.matmul import measured_peak
    from paceline.lab.bench.step_result import figures_of_profile, figures_of_times
    from paceline.lab.bench.steps import Steps

    say = _say if ranks.first else lambda _: None
    steps = Steps(config, machine, folder, ranks)
    peak_flops_per_s = measured_peak(machine)
    times = profile = silent = None
    if arguments.times or arguments.profile:
        say("first steps, which compile where the preset asks for it")
        steps.warm_up()
    if arguments.times:
        say("timed steps")
        times = steps.times(points=arguments.points, repeats=arguments.repeats)
    if arguments.profile:
        say("profiled steps")
        profile = steps.profile(Path(arguments.trace) if arguments.trace is not None and ranks.first else None)
    if arguments.times:  # last: it spoils the weights
        silent = steps.silent_times(points=arguments.points, repeats=arguments.repeats)
    return {
        **figures_of_times(config, times, silent, peak_flops_per_s, ranks.world),
        **figures_of_profile(profile, steps.sizes()),
        "micro_tokens": steps.config.batch.micro_tokens,
        "notes": list(steps.machine.notes),
    }


def train_words(arguments: StepArgs, base: RunConfig) -> list[str]:
    """The words after `paceline train` that give this benchmark's config."""
    scaled = [arguments.preset, "--scale", arguments.scale, "--steps", str(arguments.config.steps)]
    return [*scaled, *_flags(changes(base, arguments.config))]


def _flags(differences: Iterable[Change]) -> list[str]:
    words: list[str] = []
    for change in differences:
        *path, name = change.field.replace("_", "-").split(".")
        if isinstance(change.after, bool):
            words.append("--" + ".".join([*path, name if change.after else f"no-{name}"]))
        else:
            values = change.after if isinstance(change.after, tuple) else (change.after,)
            words += ["--" + ".".join([*path, name]), *map(str, values)]
    return words


def _give(
    measured: dict[str, Any], arguments: BenchArgs, command: list[str], show: Callable[[dict[str, Any]], None]
) -> int:
    """Print the result, and write it where it is wanted."""
    from paceline.lab.bench.provenance import provenance

    known = provenance(command, preset=preset(arguments.preset), config=arguments.config)
    result = {"preset": arguments.preset, "scale": arguments.scale, **measured, **known}
    return _print_or_write(result, arguments.out, arguments.json, show)


def _print_or_write(
    result: dict[str, Any], out: str | None, as_json: bool, show: Callable[[dict[str, Any]], None]
) -> int:
    if as_json:
        print(json.dumps(result, indent=1))
    else:
        show(result)
    if out is not None:  # last: a file that cannot be written costs itself alone
        write_json(Path(out), result)
    return 0


def _say(what: str) -> None:
    """Where the benchmark stands, for whoever waits; the result alone goes to standard output."""
    print(f"measuring: {what}", file=sys.stderr, flush=True)
