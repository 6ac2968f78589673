"""`paceline bench step`, `gemm` and `sample`. torch is imported only once something is measured."""

import contextlib
import os
import shlex
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from paceline.commands.output import JsonArgs, answer, say
from paceline.commands.train import PresetArgs, base_config, parse_on_preset
from paceline.core.command_line import Bare, Positional, parse
from paceline.core.environment import code_version, environment
from paceline.core.errors import ConfigError
from paceline.core.files import write_json
from paceline.core.schema import changes, to_dict
from paceline.evaluate.config import SamplingConfig
from paceline.lab.bench.start import START_STEPS, compile_cache, measure_peak, measure_start
from paceline.lab.technique import flag_words
from paceline.metrics.card import card_diff, now
from paceline.parallel.rank0_errors import rank0_errors
from paceline.recipes.presets import PRESETS, preset
from paceline.recipes.scaling import parse_scale, scaled
from paceline.settings.data import DEFAULT_MICRO_TOKENS
from paceline.settings.limits import Limited, at_least
from paceline.settings.run import RunConfig

if TYPE_CHECKING:
    from paceline.parallel.machine import Machine
    from paceline.parallel.ranks import Ranks

Show = Callable[[dict[str, Any]], None]
HARDWARE = ("platform", "cpu", "cores", "memory_bytes", "gpu", "gpu_count", "gpu_memory_bytes")
"""Of the facts about the environment, those about the machine; the others are versions."""
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
class WrittenArgs(JsonArgs):
    out: str | None = None
    """Write the JSON to this file, too."""


@dataclass(frozen=True, kw_only=True)
class BenchArgs(WrittenArgs, PresetArgs):
    config: Bare[RunConfig]


@dataclass(frozen=True, kw_only=True)
class StepArgs(BenchArgs, Limited, prefix="--"):
    points: Annotated[int, at_least(1).saying("8 follow a growing window well")] = 8
    """Windows of the schedule to measure at, at most."""
    repeats: Annotated[int, at_least(1).saying("3 show the spread")] = 3
    """Steps at each of them."""
    times: bool = True
    """Measure step times and memory."""
    start: bool = True
    """Measure the start in processes of its own: launch to step 10 with an empty and with a filled compile cache."""
    profile: bool = True
    """Profile two steps: shares by class and the longest kernels."""
    trace: str | None = None
    """Keep the profiler's trace in this file, for Perfetto; compressed if it ends in .gz."""

    def check(self) -> None:
        if self.trace is not None and not self.profile:
            raise ConfigError(f"--trace {self.trace} needs the profile; leave out --no-profile")


@dataclass(frozen=True, kw_only=True)
class GemmArgs(BenchArgs, Limited, prefix="--"):
    repeats: Annotated[int, at_least(1).saying("20 give a steady median")] = 20
    """Calls of each product, of which the median counts."""


@dataclass(frozen=True, kw_only=True)
class SampleBenchArgs(WrittenArgs, Limited, prefix="--"):
    model: Positional[Annotated[str, tyro.conf.arg(metavar="[MODEL]")]] = "demo"
    """A preset, or a run's folder."""
    scale: str = "1"
    """Of a preset: shrink it, as in training."""
    streams: tuple[int, ...] = (1, 64)
    """Texts written at the same time, one measurement each."""
    steps: Annotated[int, at_least(1)] = 128
    """Tokens of every text in one repeat."""
    repeats: Annotated[int, at_least(1)] = 5
    """Of which the median counts."""
    prompt_tokens: Annotated[int, at_least(1)] = 64
    """Length of every prompt, of random tokens."""
    compile: bool = True
    """On a GPU, compile the step before it is recorded."""
    sampling: Bare[SamplingConfig] = field(default_factory=SamplingConfig)

    def check(self) -> None:
        if not self.streams or min(self.streams) < 1:
            raise ConfigError(f"--streams {' '.join(map(str, self.streams))}: every number must be at least 1")


def step(argv: Sequence[str]) -> int:
    from paceline.lab.bench.bench_tables import show_step

    with rank0_errors():
        base = base_config(argv)
        arguments = parse_on_preset(StepArgs, argv, base, verb="bench step", description=STEP_HELP)
        if "LOCAL_RANK" in os.environ:  # a start is of processes of its own, which would be ranks of nothing
            arguments = replace(arguments, start=False)
        if arguments.start and arguments.config.steps < START_STEPS:
            steps = f"--steps {arguments.config.steps}"
            raise ConfigError(f"{steps}: a start is measured over {START_STEPS}; use more, or --no-start")
        with tempfile.TemporaryDirectory() as folder:
            result = _measure_step(arguments, base, Path(folder))
    return 0 if result is None else _give_of_preset(result, arguments, ["bench", "step", *argv], show_step)


def gemm(argv: Sequence[str]) -> int:
    from paceline.lab.bench.bench_tables import show_gemm

    arguments = parse_on_preset(GemmArgs, argv, base_config(argv), verb="bench gemm", description=GEMM_HELP)
    from paceline.lab.bench.gemm import measure_products

    result = measure_products(arguments.config, repeats=arguments.repeats)
    return _give_of_preset(result, arguments, ["bench", "gemm", *argv], show_gemm)


def sample(argv: Sequence[str]) -> int:
    from paceline.lab.bench.bench_tables import show_sample

    arguments = parse(SampleBenchArgs, argv, verb="bench sample", description=SAMPLE_HELP)
    from paceline.evaluate.load import load_run
    from paceline.lab.bench.sampling import SampleCase, measure_sampling, untrained

    if arguments.model in PRESETS:
        usual = preset(arguments.model)
        config = scaled(usual, parse_scale(arguments.scale))
        model, windows = untrained(config)
    elif arguments.scale != "1":
        raise ConfigError(f"--scale {arguments.scale} applies to presets; {arguments.model} has its size")
    else:
        run = load_run(arguments.model)
        model, windows, usual, config = run.model, run.windows, run.config, run.config
    case = SampleCase(
        steps=arguments.steps,
        repeats=arguments.repeats,
        prompt_tokens=arguments.prompt_tokens,
        sampling=arguments.sampling,
        compiled=arguments.compile,
    )
    measured = measure_sampling(model, windows, case, arguments.streams, say=_say)
    known = _provenance(["bench", "sample", *argv], preset=usual, config=config)
    return _give({"model": arguments.model, "scale": arguments.scale, **measured, **known}, arguments, show_sample)


def _measure_step(arguments: StepArgs, base: RunConfig, folder: Path) -> dict[str, Any] | None:
    """The start comes first: the steps find what it compiled, and the device is its own. None on all ranks but 0."""
    from paceline.parallel.machine import inspect_machine
    from paceline.parallel.ranks import ranks_from_environment
    from paceline.parallel.rendezvous import joined
    from paceline.train.memory_trial import release_memory
    from paceline.train.run import agreed_facts

    with compile_cache(folder / "cache") if arguments.start else contextlib.nullcontext():
        starts = measure_start(train_words(arguments, base), folder, say=_say) if arguments.start else {}
        ranks = ranks_from_environment()
        config, machine = inspect_machine(arguments.config, ranks)
        with joined(ranks, machine.device, agreed_facts(arguments.config), config.parallel):
            measured = _measure_here(arguments, config, machine, ranks)
        if arguments.start and (measured["micro_tokens"] or 0) > DEFAULT_MICRO_TOKENS:
            release_memory()  # another process is about to ask for it
            peak = measure_peak(train_words(arguments, base), folder, DEFAULT_MICRO_TOKENS, say=_say)
            measured["peak_gib"] = None if peak is None else peak / 2**30
    both = {"cold_start_s": starts.get("cold"), "warm_start_s": starts.get("warm"), **measured}
    return both if ranks.is_main else None


def _measure_here(arguments: StepArgs, config: RunConfig, machine: "Machine", ranks: "Ranks") -> dict[str, Any]:
    from paceline.lab.bench.gemm import measured_peak
    from paceline.lab.bench.steps import Steps, figures_of_profile, figures_of_times

    say = _say if ranks.is_main else lambda _: None
    steps = Steps(config, machine, ranks)
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
        profile = steps.profile(Path(arguments.trace) if arguments.trace is not None and ranks.is_main else None)
    if arguments.times and ranks.world > 1:  # last: it spoils the weights
        silent = steps.times(points=arguments.points, repeats=arguments.repeats, exchange=False)
    return {
        **figures_of_times(config, times, silent, peak_flops_per_s, ranks.world),
        **figures_of_profile(profile, steps.sizes()),
        "micro_tokens": steps.config.batch.micro_tokens,
        "notes": list(steps.machine.notes),
    }


def train_words(arguments: StepArgs, base: RunConfig) -> list[str]:
    """The words after `paceline train` that give this benchmark's config."""
    scaled = [arguments.preset, "--scale", arguments.scale, "--steps", str(arguments.config.steps)]
    changed = changes(base, arguments.config)
    return [*scaled, *(word for change in changed for word in flag_words(change.field, change.after))]


def _provenance(command: Sequence[str], *, preset: RunConfig, config: RunConfig) -> dict[str, Any]:
    """What a reader needs to judge or repeat a benchmark. `diff`: what was not the preset's."""
    facts, code = environment(), code_version()
    return {
        "what": shlex.join(["paceline", *command[:2]]),
        "hardware": {name: facts[name] for name in HARDWARE if name in facts},
        # the clock is taken under load by the benchmark itself
        "versions": {name: value for name, value in facts.items() if name not in (*HARDWARE, "gpu_sm_clock_mhz")},
        "date": now(),
        "commit": code.commit,
        "dirty": code.dirty,
        "command": shlex.join(["paceline", *command]),
        "diff": [to_dict(change) for change in card_diff(preset, config)],
    }


def _give_of_preset(measured: dict[str, Any], arguments: BenchArgs, command: list[str], show: Show) -> int:
    known = _provenance(command, preset=preset(arguments.preset), config=arguments.config)
    return _give({"preset": arguments.preset, "scale": arguments.scale, **measured, **known}, arguments, show)


def _give(result: dict[str, Any], arguments: WrittenArgs, show: Show) -> int:
    answer(result, lambda: show(result), as_json=arguments.json)
    if arguments.out is not None:  # last: a file that cannot be written costs itself alone
        write_json(Path(arguments.out), result)
    return 0


def _say(what: str) -> None:
    say(f"measuring: {what}")
