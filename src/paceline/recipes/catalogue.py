"""The presets as facts: sizes, lengths, what the public logs say, and each one's difference from its predecessor."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from paceline.core.schema import Change, changes
from paceline.recipes.presets import PRESETS, preset
from paceline.recipes.records import HISTORY, PUBLIC
from paceline.settings.schedule import mean_batch_tokens, tokens_before
from paceline.settings.spec import describe


@dataclass(frozen=True, kw_only=True)
class CatalogueEntry:
    name: str
    summary: str
    """First sentence of the preset's docstring."""
    record: int | None
    predecessor: str | None
    parameters: int
    steps: int
    tokens_per_step: int
    """Mean over the steps."""
    train_tokens: int
    public_minutes: float | None
    """On eight H100, by the records' clock."""
    public_val_loss: float | None
    changes: tuple[Change, ...]
    """Against the predecessor."""

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "changes": listed(self.changes)}


def listed(found: Iterable[Change]) -> list[dict[str, Any]]:
    """Changes as JSON."""
    return [{"field": change.field, "from": change.before, "to": change.after} for change in found]


def catalogue() -> list[CatalogueEntry]:
    return [_entry(name) for name in PRESETS]


def _entry(name: str) -> CatalogueEntry:
    config, public = PRESETS[name](), PUBLIC.get(name)
    before = public.predecessor if public else None
    about = " ".join((PRESETS[name].__doc__ or "").split())
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
