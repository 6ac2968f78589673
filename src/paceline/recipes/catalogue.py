"""The presets as facts: sizes, lengths, what the public logs say, and each one's difference from its predecessor."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from paceline.core.schema import Change, changes, plain
from paceline.recipes.presets import PRESETS, predecessor, preset
from paceline.recipes.records import HISTORY, PUBLIC
from paceline.settings.plugins import tables
from paceline.settings.schedule import mean_batch_tokens, tokens_before
from paceline.settings.spec import describe


@dataclass(frozen=True, kw_only=True)
class CatalogueEntry:
    name: str
    summary: str  # first sentence of the preset's docstring
    record: int | None
    predecessor: str | None
    parameters: int
    steps: int
    tokens_per_step: int  # mean over the steps
    train_tokens: int
    public_minutes: float | None  # on eight H100, by the records' clock
    public_val_loss: float | None
    changes: tuple[Change, ...]  # against the predecessor

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "changes": listed(self.changes)}


def listed(found: Iterable[Change]) -> list[dict[str, Any]]:
    return [{"field": change.field, "from": plain(change.before), "to": plain(change.after)} for change in found]


def catalogue() -> list[CatalogueEntry]:
    """Of the package's presets and those of the plug-ins that are loaded."""
    brought = {name: change for table in tables("presets") for name, (_, change) in table.items()}
    return [_entry(name, make.__doc__, predecessor(name)) for name, make in {**PRESETS, **brought}.items()]


def _entry(name: str, doc: str | None, before: str | None) -> CatalogueEntry:
    config, public = preset(name), PUBLIC.get(name)
    about = " ".join((doc or "").split())
    return CatalogueEntry(
        name=name,
        summary=about.split(". ")[0].rstrip("."),
        record=public.record if public else None,
        predecessor=before,
        parameters=describe(config.model).numel(),
        steps=config.steps,
        tokens_per_step=round(mean_batch_tokens(config)),
        train_tokens=tokens_before(config, config.steps),
        public_minutes=public.minutes if public else None,
        public_val_loss=public.val_loss if public else None,
        changes=tuple(changes_between(before, name) if before else ()),
    )


def changes_between(before: str, after: str) -> list[Change]:
    """The settings in which two presets differ, but for the name, and, of the records from the one to the other, what
    only the original scripts changed."""
    found = [change for change in changes(preset(before), preset(after)) if change.field != "preset"]
    chain, newest = [], after
    while newest in PUBLIC and newest != before:
        chain.append(newest)
        newest = PUBLIC[newest].predecessor or before
    return found + [HISTORY[name] for name in reversed(chain) if name in HISTORY]
