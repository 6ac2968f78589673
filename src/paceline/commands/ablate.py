"""`paceline ablate`: what does each part of a record buy? torch is imported by the runs alone."""

import contextlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from paceline.commands.train import base_config
from paceline.core.command_line import Bare, PresetName, parse
from paceline.core.errors import ConfigError, UserError
from paceline.lab.ablate.plan import Choice, Plan, make_plan
from paceline.parallel.config import SlurmConfig
from paceline.recipes.records import PUBLIC
from paceline.recipes.scaling import parse_scale
from paceline.train.config import RunConfig

HELP = """What does a technique buy? Train with and without it, over several seeds, and say what it does to loss, time
and memory, with intervals. By default the difference between a preset and its predecessor is taken apart.

example: paceline ablate demo --without muon --steps 60 --out runs/muon
example: paceline ablate r18-softcap --scale 1/16 --steps 20 --out runs/ablate-r18

Flags of `paceline train` apply to all runs. Stopping and giving the same command again goes on where it was."""


@dataclass(frozen=True, kw_only=True)
class AblateArgs:
    preset: PresetName
    """The newer preset; `paceline presets` lists them."""
    against: str | None = None
    """The older one; None: the preset's predecessor."""
    without: tuple[str, ...] = ()
    """Instead of an older preset: techniques that the preset has, by the names of their cards, or settings with the
    values that they would have, as model.softcap=None."""
    seeds: int = 3
    """Runs of every arm, with --seed and the numbers that follow it."""
    only: str | None = None
    """Parts of the diff to look at, with commas between; None: all."""
    add: bool = True
    """Runs of the predecessor with one part added."""
    leave_out: bool = True
    """Runs of the preset with one part left out."""
    base: bool = True
    """Runs of the predecessor itself, which the waterfall begins with; added parts need them in any case."""
    rates: bool = False
    """Try each arm at 0.8, 1 and 1.25 of its learning rates and judge it at its best; three times as many runs."""
    scale: str = "1"
    """Shrink width, head width, vocabulary, batch and steps together: a number in (0, 1], or 1/16."""
    out: str | None = None
    """Folder for the runs and ablation.json; runs/ablate-PRESET otherwise."""
    jobs: int | None = None
    """Runs at a time; None: one for each GPU, or one on a CPU."""
    launch: Literal["local", "slurm"] = "local"
    """Where runs go: here, or each into a job of Slurm's (`--slurm.*`; needs `paceline[slurm]`)."""
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    keep_checkpoints: bool = False
    """Keep the checkpoints of finished runs."""
    dry_run: bool = False
    """Only say which runs there would be and how long they would take."""
    json: bool = False
    """For programs."""
    config: Bare[RunConfig]


def ablate(argv: Sequence[str]) -> int:
    arguments = parse_arguments(argv, base_config(argv))
    plan = _plan(argv, arguments)
    from paceline.lab.ablate.show import console_for

    console = console_for(arguments.json)
    folder = Path(arguments.out or f"runs/ablate-{arguments.config.preset}")
    return _dry_run(plan, arguments, folder, console) if arguments.dry_run else _run(plan, arguments, folder, console)


def parse_arguments(argv: Sequence[str], base: RunConfig) -> AblateArgs:
    """The flags on top of `base`, which `base_config` made of the same words."""
    defaults = AblateArgs(preset=base.preset, config=base)
    arguments = parse(AblateArgs, argv, verb="ablate", description=HELP, default=defaults)
    if arguments.preset != base.preset:
        raise ConfigError(f"the preset {arguments.preset} goes first: paceline ablate {arguments.preset} --flags")
    for name in ("seeds", "jobs"):
        if (value := getattr(arguments, name)) is not None and value < 1:
            raise ConfigError(f"--{name} {value} must be at least 1")
    parse_scale(arguments.scale)
    return arguments


def _plan(argv: Sequence[str], arguments: AblateArgs) -> Plan:
    """The same flags on both configs, at the newer one's number of steps."""
    from paceline.lab.ablate.here import device_of

    off = [word for asked in arguments.without for word in _off(asked, arguments.config)]
    words = [_older(arguments), *argv[1:], *off, "--steps", str(arguments.config.steps)]
    older = parse_arguments(words, base_config(words))
    local = arguments.launch == "local"
    choice = Choice(
        scale=arguments.scale,
        seeds=arguments.seeds,
        only=arguments.only,
        add=arguments.add,
        leave_out=arguments.leave_out,
        base=arguments.base,
        rates=arguments.rates,
        device=device_of(arguments.config) if local else "cuda" if arguments.slurm.gpus else "cpu",
        ranks=1 if local else arguments.slurm.nodes * arguments.slurm.ranks_per_node,
    )
    return make_plan(older.config, arguments.config, choice)


def _older(arguments: AblateArgs) -> str:
    """The preset that the other config is made from."""
    if arguments.without:
        if arguments.against is not None:
            raise ConfigError(f"--without and --against {arguments.against} exclude each other; give one of them")
        return arguments.preset
    public = PUBLIC.get(arguments.preset)
    against = arguments.against or (public.predecessor if public else None)
    if against is None:
        raise UserError(
            f"{arguments.preset} has no predecessor; name what it is to be compared with: a preset by --against, or "
            f"techniques by --without, such as --without muon"
        )
    return against


def _off(asked: str, config: RunConfig) -> list[str]:
    """The flags by which a config does without a technique, or has a setting at the value given."""
    from paceline.lab.technique import flag_words, is_in
    from paceline.lab.techniques import technique

    name, given, value = asked.partition("=")
    if given:
        flags = {"True": True, "False": False}
        return flag_words(name, flags.get(value, value))
    if not (found := technique(name)).switches:
        raise UserError(f"--without {name}: it is always on; there is nothing to switch")
    if not is_in(found, config):
        raise UserError(f"--without {name}: {config.preset} does not have it")
    return [word for switch in found.switches for word in flag_words(switch.field, switch.off)]


def _jobs(plan: Plan, arguments: AblateArgs) -> int:
    """How many runs at a time."""
    if arguments.launch == "slurm":
        return arguments.jobs or len(plan.runs)
    from paceline.lab.ablate.here import jobs_here

    return jobs_here(plan, arguments.jobs)


def _dry_run(plan: Plan, arguments: AblateArgs, folder: Path, console: Any) -> int:
    from paceline.lab.ablate.estimate import duration, told
    from paceline.lab.ablate.outcomes import outcomes
    from paceline.lab.ablate.show import show_plan

    found = outcomes(plan.runs, folder)
    known, jobs = duration(plan, found), _jobs(plan, arguments)
    left = sum(one.state in ("waiting", "unfinished") for one in found)
    show_plan(plan, console)
    console.print(told(known, left, jobs), highlight=False)
    if arguments.json:
        print(json.dumps({**plan.as_json(), "left_s": known.left(left, jobs) if known else None}, indent=1))
    return 0


def _run(plan: Plan, arguments: AblateArgs, folder: Path, console: Any) -> int:
    from paceline.lab.ablate.here import concluded, launch_here, opened
    from paceline.lab.ablate.outcomes import strangers
    from paceline.lab.ablate.result import ABLATION_FILE
    from paceline.lab.ablate.schedule import carry_out
    from paceline.lab.ablate.show import Progress, show_ablation, show_plan

    jobs = _jobs(plan, arguments)
    with opened(plan, folder) as (series, lock):
        show_plan(plan, console)
        launch = launch_here(plan, jobs, lock) if arguments.launch == "local" else _slurm_launch(arguments.slurm)
        with Progress(plan, jobs, console) as progress:
            carry_out(series, launch, jobs=jobs, keep_checkpoints=arguments.keep_checkpoints, show=progress)
        for name in strangers(plan.runs, folder):
            console.print(f"{folder / name} is no run of this ablation and is left alone", highlight=False)
        if series.stopped_by is not None:
            console.print(f"{folder}: stopped; the same command goes on where it was", highlight=False)
            return 128 + series.stopped_by
        ablation = concluded(plan, series)
    show_ablation(ablation, console)
    console.print(f"{folder / ABLATION_FILE}", highlight=False)
    if arguments.json:
        print(json.dumps(ablation.as_json(), indent=1))
    return 1 if ablation.not_counted else 0


def _slurm_launch(config: SlurmConfig) -> Any:
    """Each run a job; Slurm decides how many of them run at a time."""
    from paceline.commands.slurm import SlurmChild, submit

    def launch(words: Sequence[str], log: Path, place: int) -> SlurmChild:
        with contextlib.redirect_stdout(sys.stderr):  # the answer alone goes to the other stream
            return SlurmChild(submit(words, config, name=log.stem), log)

    return launch
