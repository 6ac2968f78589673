"""The presets as facts: sizes, lengths, what the public logs say, and each one's difference from its predecessor."""

from dataclasses import dataclass
from typing import Any

from paceline.core.schema import Change, changes
from paceline.metrics.flops import parameter_counts
from paceline.recipes.presets import PRESETS
from paceline.recipes.records import PUBLIC


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
    train_tokens: int
    public_minutes: float | None
    """On eight H100, by the records' clock."""
    public_val_loss: float | None
    changes: tuple[Change, ...]
    """Against the predecessor."""

    def as_json(self) -> dict[str, Any]:
        listed = [{"field": c.field, "from": c.before, "to": c.after} for c in self.changes]
        return {**self.__dict__, "changes": listed}


def catalogue() -> list[CatalogueEntry]:
    return [_entry(name) for name in PRESETS]


def _entry(name: str) -> CatalogueEntry:
    config, public = PRESETS[name](), PUBLIC.get(name)
    before = public.predecessor if public else None
    diff = changes(PRESETS[before](), config) if before else []
    return CatalogueEntry(
        name=name,
        summary=_first_sentence(PRESETS[name].__doc__ or ""),
        record=public.record if public else None,
        predecessor=before,
        parameters=parameter_counts(config.model)["total"],
        steps=config.steps,
        tokens_per_step=config.batch.tokens,
        train_tokens=config.steps * config.batch.tokens,
        public_minutes=public.minutes if public else None,
        public_val_loss=public.val_loss if public else None,
        changes=tuple(change for change in diff if change.field != "preset"),
    )


def _first_sentence(text: str) -> str:
    """Up to the first full stop, on one line."""
    return " ".join(text.split()).split(". ")[0].rstrip(".")
