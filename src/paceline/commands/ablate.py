"""`paceline ablate`: what does each part of a record buy? torch is imported by the runs alone."""

import contextlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from paceline.commands.train import base_config, parse_on_preset
from paceline.core.command_line import Bare, PresetName, Repeated
from paceline.core.errors import ConfigError, UserError
from paceline.core.schema import to_dict
from paceline.lab.ablate.arms import Choice, Plan, make_plan
from paceline.recipes.presets import predecessor
from paceline.settings.parallel import SlurmConfig
from paceline.settings.run import RunConfig

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
    plugin: Repeated[str] = ()
    """A Python file of yours, for all runs (docs/plug-ins.md). It is executed. May be given several times."""
    choice: Bare[Choice] = field(default_factory=Choice)
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
    """Only say which runs there would be, and how long they take if one has ended (`paceline plan` predicts it)."""
    json: bool = False
    """For programs."""
    config: Bare[RunConfig]


def ablate(argv: Sequence[str]) -> int:
    arguments = _parsed(argv)
    plan = _plan(argv, arguments)
    from paceline.lab.ablate.local import jobs_at_a_time

    jobs = jobs_at_a_time(plan, arguments.jobs, local=arguments.launch == "local")
    folder = Path(arguments.out or f"runs/ablate-{arguments.config.preset}")
    return (_dry_run if arguments.dry_run else _run)(plan, jobs, folder, arguments)


def _parsed(argv: Sequence[str]) -> AblateArgs:
    return parse_on_preset(AblateArgs, argv, base_config(argv), verb="ablate", description=HELP)


def _plan(argv: Sequence[str], arguments: AblateArgs) -> Plan:
    """The same flags on both configs, at the newer one's number of steps."""
    from paceline.lab.ablate.local import device_of

    off = [word for asked in arguments.without for word in _off(asked, arguments.config)]
    older = _parsed([_older(arguments), *argv[1:], *off, "--steps", str(arguments.config.steps)])
    local, slurm = arguments.launch == "local", arguments.slurm
    device = device_of(arguments.config) if local else "cuda" if slurm.gpus else "cpu"
    choice = replace(arguments.choice, device=device, ranks=1 if local else slurm.nodes * slurm.ranks_per_node)
    return make_plan(older.config, arguments.config, choice)


def _older(arguments: AblateArgs) -> str:
    """The preset that the other config is made from."""
    if arguments.without:
        if arguments.against is not None:
            raise ConfigError(f"--without and --against {arguments.against} exclude each other; give one of them")
        return arguments.preset
    against = arguments.against or predecessor(arguments.preset)
    if against is None:
        cure = "name a preset by --against, or techniques by --without, such as --without muon"
        raise UserError(f"{arguments.preset} has no predecessor; {cure}")
    return against


def _off(asked: str, config: RunConfig) -> list[str]:
    """The flags by which a config does without a technique, or has a setting at the value given."""
    from paceline.lab.technique import flag_words, is_in, technique

    name, given, value = asked.partition("=")
    if given:
        return flag_words(name, value == "True" if value in ("True", "False") else value)
    if not (found := technique(name)).switches:
        raise UserError(f"--without {name}: it is always on; there is nothing to switch")
    if not is_in(found, config):
        raise UserError(f"--without {name}: {config.preset} does not have it")
    return [word for switch in found.switches for word in flag_words(switch.field, switch.off)]


def _dry_run(plan: Plan, jobs: int, folder: Path, arguments: AblateArgs) -> int:
    from paceline.lab.ablate.ablation_text import console_for, seconds_left, show_plan, time_left
    from paceline.lab.ablate.outcomes import outcomes

    found, console = outcomes(plan.runs, folder), console_for(arguments.json)
    left = sum(one.state in ("waiting", "unfinished") for one in found)
    show_plan(plan, console)
    console.print(time_left(found, left, jobs), highlight=False)
    if arguments.json:
        print(json.dumps({**plan.as_json(), "left_s": seconds_left(found, left, jobs)}, indent=1))
    return 0


def _run(plan: Plan, jobs: int, folder: Path, arguments: AblateArgs) -> int:
    from paceline.analysis.ablation import ABLATION_FILE
    from paceline.lab.ablate.ablation_text import console_for, show_ablation
    from paceline.lab.ablate.local import run_ablation

    console = console_for(arguments.json)
    launch, keep = None if arguments.launch == "local" else _slurm_launch(arguments.slurm), arguments.keep_checkpoints
    found = run_ablation(
        plan, folder, jobs=jobs, console=console, plan_shown=True, launch=launch, keep_checkpoints=keep
    )
    if isinstance(found, int):
        console.print(f"{folder}: stopped; the same command goes on where it was", highlight=False)
        return 128 + found
    show_ablation(found, console)
    console.print(f"{folder / ABLATION_FILE}", highlight=False)
    if arguments.json:
        print(json.dumps(to_dict(found), indent=1))
    return 1 if found.not_counted else 0


def _slurm_launch(config: SlurmConfig) -> Any:
    """Each run a job; Slurm decides how many of them run at a time."""
    from paceline.commands.slurm import SlurmChild, submit

    def launch(words: Sequence[str], log: Path, place: int) -> SlurmChild:
        with contextlib.redirect_stdout(sys.stderr):  # the answer alone goes to the other stream
            return SlurmChild(submit(words, config, name=log.stem), log)

    return launch
