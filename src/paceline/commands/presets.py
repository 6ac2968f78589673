"""`paceline presets` and `paceline diff`, without torch."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.command_line import PresetName, parse
from paceline.core.schema import Change, changes
from paceline.recipes.catalogue import CatalogueEntry, catalogue
from paceline.recipes.presets import preset

PRESETS_HELP = """List the presets: what each one is, how large, how long, and what it changed.

example: paceline presets"""
DIFF_HELP = """What changed between two presets.

example: paceline diff r17-sparse-values r18-softcap"""


@dataclass(frozen=True, kw_only=True)
class PresetsArgs:
    json: bool = False
    """For programs."""


def presets(argv: Sequence[str]) -> int:
    arguments = parse(PresetsArgs, argv, verb="presets", description=PRESETS_HELP)
    entries = catalogue()
    if arguments.json:
        print(json.dumps([entry.as_json() for entry in entries], indent=1))
    else:
        _show_presets(entries)
    return 0


def _show_presets(entries: list[CatalogueEntry]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for heading in ("preset", "parameters", "steps", "tokens/step", "what it is"):
        table.add_column(heading, justify="left" if heading in ("preset", "what it is") else "right")
    for entry in entries:
        sizes = (f"{entry.parameters:,}", f"{entry.steps:,}", f"{entry.tokens_per_step:,}")
        table.add_row(entry.name, *sizes, entry.summary)
    Console().print(table)


@dataclass(frozen=True, kw_only=True)
class DiffArgs:
    before: PresetName
    """A preset."""
    after: PresetName
    """Another."""
    json: bool = False
    """For programs."""


def diff(argv: Sequence[str]) -> int:
    arguments = parse(DiffArgs, argv, verb="diff", description=DIFF_HELP)
    found = [c for c in changes(preset(arguments.before), preset(arguments.after)) if c.field != "preset"]
    if arguments.json:
        print(json.dumps([{"field": c.field, "from": c.before, "to": c.after} for c in found], indent=1))
    else:
        _show_diff(arguments, found)
    return 0


def _show_diff(arguments: DiffArgs, found: list[Change]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for heading in ("switch", arguments.before, arguments.after):
        table.add_column(heading)
    for change in found:
        table.add_row(change.field, shown(change.before), shown(change.after))
    Console().print(table if found else f"{arguments.before} and {arguments.after} do not differ")


def shown(value: object) -> str:
    """A setting as a person would write it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
