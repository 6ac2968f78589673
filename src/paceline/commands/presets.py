"""`paceline presets`, `diff` and `schedule`: what a preset is, without torch."""

import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.commands.output import JsonArgs, answer
from paceline.commands.train import base_config, parse_arguments
from paceline.core.command_line import PresetName, Repeated, parse
from paceline.core.schema import Change, stated
from paceline.core.units import human_count
from paceline.lab.technique import is_in, techniques
from paceline.metrics.console import console_on, plain_table
from paceline.recipes.catalogue import CatalogueEntry, catalogue, changes_between, listed
from paceline.recipes.plugins import load_plugins
from paceline.recipes.presets import preset
from paceline.settings.groups import param_groups
from paceline.settings.run import RunConfig
from paceline.settings.schedule import StepSettings, tokens_before
from paceline.settings.schedule import schedule as settings_of
from paceline.settings.spec import describe

PRESETS_HELP = """List the presets: what each one is, how large, how long, and what it changed.

example: paceline presets"""
DIFF_HELP = """What changed between two presets.

example: paceline diff r17-sparse-values r18-softcap"""
SCHEDULE_HELP = """Print the schedule of a preset: batch size, windows, rates and momentum by stage.

example: paceline schedule r18-softcap --steps 266"""


@dataclass(frozen=True, kw_only=True)
class PresetsArgs(JsonArgs):
    plugin: Repeated[str] = ()
    """A Python file of yours with presets, which is executed. May be given several times."""


@dataclass(frozen=True, kw_only=True)
class DiffArgs(PresetsArgs):
    before: PresetName
    """A preset."""
    after: PresetName
    """Another."""


def presets(argv: Sequence[str]) -> int:
    arguments = parse(PresetsArgs, argv, verb="presets", description=PRESETS_HELP)
    load_plugins(arguments.plugin)
    entries = catalogue()
    return answer([entry.as_json() for entry in entries], lambda: _show_presets(entries), as_json=arguments.json)


def _show_presets(entries: list[CatalogueEntry]) -> None:
    table = plain_table("preset", ">parameters", ">steps", ">tokens/step", "what it is")
    for entry in entries:
        sizes = (f"{entry.parameters:,}", f"{entry.steps:,}", f"{entry.tokens_per_step:,}")
        table.add_row(entry.name, *sizes, entry.summary)
    console_on(sys.stdout).print(table)


def diff(argv: Sequence[str]) -> int:
    arguments = parse(DiffArgs, argv, verb="diff", description=DIFF_HELP)
    load_plugins(arguments.plugin)
    found = changes_between(arguments.before, arguments.after)
    return answer(listed(found), lambda: _show_diff(arguments, found), as_json=arguments.json)


def _show_diff(arguments: DiffArgs, found: list[Change]) -> None:
    console = console_on(sys.stdout)
    table = plain_table("switch", arguments.before, arguments.after)
    table.columns[0].no_wrap = True
    for change in found:
        if not change.nested:
            table.add_row(change.field, _shown(change.before), _shown(change.after))
    console.print(table if found else f"{arguments.before} and {arguments.after} do not differ")
    for change in found:
        for name, value in ((arguments.before, change.before), (arguments.after, change.after)):
            if change.nested and value:
                entries = stated(value, _shown, "\n  ")
                console.print(f"{change.field} of {name}:\n  {entries}", highlight=False, soft_wrap=True)
    before, after = preset(arguments.before), preset(arguments.after)
    switched = [one for one in techniques().values() if one.switches and is_in(one, before) != is_in(one, after)]
    for name, config in ((arguments.before, before), (arguments.after, after)):
        if titles := [one.title for one in switched if is_in(one, config)]:
            console.print(f"techniques of {name} only: {'; '.join(titles)}")


def _shown(value: object) -> str:
    """A setting as a person would write it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def schedule(argv: Sequence[str]) -> int:
    words = [word for word in argv if word != "--json"]
    config = parse_arguments(words, base_config(words), verb="schedule", description=SCHEDULE_HELP).config
    steps = (settings_of(config, step) for step in range(config.steps))
    parts = itertools.groupby(steps, lambda at: (at.stage, at.sequences, at.windows, at.loss_weights))
    rows = [_stretch(config, part[0], part[-1]) for part in (list(group) for _, group in parts)]
    return answer(rows, lambda: _show_schedule(config, rows), as_json="--json" in argv)


def _stretch(config: RunConfig, first: StepSettings, last: StepSettings) -> dict[str, Any]:
    """Of steps that differ in rates and momentum alone. Stages count from 1, steps from 0; pairs are first and last."""
    return {
        "stage": first.stage + 1,
        "first": first.step,
        "last": last.step,
        "tokens_per_step": first.sequences * config.batch.sequence_tokens,
        "tokens": tokens_before(config, last.step + 1) - tokens_before(config, first.step),
        "windows": first.windows,
        "lr_scale": [first.lr_scale, last.lr_scale],
        "momentum": [max(group.momentum for group in end.groups.values()) for end in (first, last)],
        "loss_weights": first.loss_weights,
    }


def _show_schedule(config: RunConfig, rows: list[dict[str, Any]]) -> None:
    weighed = [f">{term.name} weight" for term in config.model.loss_terms]
    table = plain_table(">stage", ">steps", ">tokens/step", ">tokens", ">windows", ">lr scale", ">momentum", *weighed)
    for row in rows:
        windows = " / ".join(f"{window:,}" for window in row["windows"].values()) or "none"
        steps, tokens = f"{row['first']:,} to {row['last']:,}", human_count(row["tokens"])
        ranges = (_range(*row["lr_scale"]), _range(*row["momentum"]), *(f"{w:g}" for w in row["loss_weights"]))
        table.add_row(str(row["stage"]), steps, f"{row['tokens_per_step']:,}", tokens, windows, *ranges)
    groups = plain_table("group", "rule", ">base rate", ">beta1", ">beta2", ">decay", ">moves")
    for group in param_groups(config.optim, describe(config.model).groups).values():
        betas = ("", "") if group.rule == "muon" else (f"{group.beta1:g}", f"{group.beta2:g}")
        moves = "every step" if group.every == 1 else f"every {group.every} steps"
        groups.add_row(group.name, group.rule, f"{group.lr:.4g}", *betas, f"{group.weight_decay:g}", moves)
    console_on(sys.stdout).print(table, "", groups, sep="\n")


def _range(*ends: float) -> str:
    return " to ".join(dict.fromkeys(f"{end:.3f}" for end in ends))
