"""The verbs `train`, `presets` and `diff`. torch is imported only once a run really starts."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.core.command_line import Bare, Positional, parse
from paceline.core.schema import Change, changes, from_dict
from paceline.recipes.presets import preset
from paceline.recipes.scaling import parse_scale, scaled, with_steps
from paceline.train.config import RunConfig

TRAIN_HELP = """Train a preset and leave a run folder with a card, metrics, a checkpoint and a report.

example: paceline train demo --steps 200 --seed 1 --out runs/short"""


@dataclass(frozen=True, kw_only=True)
class TrainArgs:
    preset: Positional[str] = "demo"
    """Which preset; `paceline presets` lists them."""
    scale: str = "1"
    """Shrink width, head width, vocabulary, batch and steps together: a number in (0, 1], or 1/16."""
    out: str | None = None
    """Run folder; runs/<preset> otherwise."""
    resume: str | None = None
    """Continue this run (a folder, a name under runs/, or `latest`) from its newest good checkpoint."""
    launch: Literal["local"] = "local"
    """Where the run goes."""
    sample: bool = True
    """End with a sample and a report page."""
    config: Bare[RunConfig]


def train(argv: Sequence[str]) -> int:
    base = _base_config(argv)
    defaults = TrainArgs(preset=base.preset, config=base)
    arguments = parse(TrainArgs, argv, verb="train", description=TRAIN_HELP, default=defaults)
    from paceline.recipes.launch import launch

    return launch(arguments)


def _base_config(argv: Sequence[str]) -> RunConfig:
    """What the flags change: the preset scaled to --scale and --steps, or the run that is resumed."""
    if (run := _value_of("--resume", argv)) is not None:
        from paceline.checkpoint.run_folder import open_run

        return from_dict(RunConfig, open_run(run).read_config())
    config = preset(_preset_name(argv))
    if (scale := _value_of("--scale", argv)) is not None:
        config = scaled(config, parse_scale(scale))
    if (steps := _value_of("--steps", argv)) is not None and steps.isdigit() and int(steps) > 0:
        config = with_steps(config, int(steps))
    return config


def _preset_name(argv: Sequence[str]) -> str:
    return argv[0] if argv and not argv[0].startswith("-") else "demo"


def _value_of(flag: str, argv: Sequence[str]) -> str | None:
    """The last value given to a flag, in either spelling. tyro reads it again; here it decides the defaults."""
    value = None
    for word, following in zip(argv, [*argv[1:], None], strict=True):
        if word == flag:
            value = following
        elif word.startswith(f"{flag}="):
            value = word.split("=", 1)[1]
    return value


@dataclass(frozen=True, kw_only=True)
class PresetsArgs:
    json: bool = False
    """For programs."""


def presets(argv: Sequence[str]) -> int:
    arguments = parse(PresetsArgs, argv, verb="presets", description="List the presets.\n\nexample: paceline presets")
    from paceline.recipes.catalogue import catalogue, show_catalogue

    if arguments.json:
        print(json.dumps(catalogue(), indent=1))
    else:
        show_catalogue()
    return 0


@dataclass(frozen=True, kw_only=True)
class DiffArgs:
    before: Positional[str]
    """A preset."""
    after: Positional[str]
    """Another."""
    json: bool = False
    """For programs."""


def diff(argv: Sequence[str]) -> int:
    text = "What changed between two presets.\n\nexample: paceline diff demo r18-softcap"
    arguments = parse(DiffArgs, argv, verb="diff", description=text)
    found = [c for c in changes(preset(arguments.before), preset(arguments.after)) if c.field != "preset"]
    if arguments.json:
        print(json.dumps([{"field": c.field, "from": c.before, "to": c.after} for c in found], indent=1))
    else:
        _show_diff(arguments, found)
    return 0


def _show_diff(arguments: DiffArgs, found: list[Change]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{arguments.before} → {arguments.after}", title_justify="left", box=None, pad_edge=False)
    for heading in ("switch", arguments.before, arguments.after):
        table.add_column(heading)
    for change in found:
        table.add_row(change.field, _shown(change.before), _shown(change.after))
    Console().print(table if found else "no difference")


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, int):
        return f"{value:,}"
    return "none" if value is None else str(value)
