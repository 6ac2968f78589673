"""Run folders as comparisons, boards, ablations and pages read them: card and config, never a checkpoint. No torch.

Files of older versions get today's names of settings (`core.migrations`) and today's defaults, so equal runs of two
versions read as equal. A config that this version does not understand is read without a schema: a page can still show
the run. A folder that cannot be read is named with the reason, never skipped silently.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.analysis.facts import code, hardware, short_data
from paceline.checkpoint.run_folder import RunFolder
from paceline.core.errors import ConfigError, RunError
from paceline.core.files import check_links
from paceline.core.migrations import leaves, migrate_config, migrate_field
from paceline.core.schema import from_dict, to_dict
from paceline.metrics.card import CARD_FILE, LOSS_COLUMNS, RunCard, read_card
from paceline.metrics.metrics_file import finite
from paceline.settings.run import RunConfig


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    run: str
    why: str


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredRun:
    label: str  # the folder's name; on a page the card's, made unique
    folder: Path
    card: RunCard
    config: dict[str, Any]  # dotted name to value
    settings: RunConfig | None = None  # the same as a whole; None: this version does not understand it
    arm: str | None = None  # which arm of an ablation it is

    @property
    def steps_done(self) -> int:
        return self.card.steps_done

    @property
    def hardware(self) -> str:
        return hardware(self.card)

    @property
    def machine(self) -> tuple[str, str]:
        """Hardware and code version: times may be averaged where both are equal."""
        return self.hardware, code(self.card)


def data(run: StoredRun) -> str:
    """The data's folder, by name, and the beginnings of their fingerprints."""
    return f"{Path(str(run.config.get('data.dir', '?'))).name} {short_data(run.card)}"


@dataclass(frozen=True, kw_only=True)
class Validation:
    loss: float
    train_s: float


def validations(card: RunCard) -> dict[int, Validation]:
    """By step; those with a finite loss."""
    found = {}
    for row in card.losses:
        named = dict(zip(LOSS_COLUMNS, row, strict=False))
        step, loss, train_s = (named.get(name) for name in ("step", "val_loss", "train_s"))
        if step is not None and loss is not None and train_s is not None:
            found[int(step)] = Validation(loss=loss, train_s=train_s)
    return found


def read_runs(folders: Iterable[Path]) -> tuple[list[StoredRun], list[LeftOut]]:
    """Every run that can be read, each folder once; and the others, with reasons."""
    found, damaged = [], []
    for folder in dict.fromkeys(folder.resolve() for folder in folders):
        try:
            found.append(read_run(folder))
        except RunError as error:
            damaged.append(LeftOut(run=folder.name, why=str(error)))
    return found, damaged


def read_run(folder: Path) -> StoredRun:
    """The run in `folder`, or a RunError that names the damaged file."""
    check_links(folder)
    card = read_card(folder)
    check_finite(folder / CARD_FILE, to_dict(card))
    config, settings = read_config(folder)
    return StoredRun(label=folder.name, folder=folder, card=card, config=config, settings=settings)


def read_config(folder: Path) -> tuple[dict[str, Any], RunConfig | None]:
    try:
        values = RunFolder(folder).read_config()
    except ConfigError as error:
        raise RunError(str(error)) from None
    try:
        config = from_dict(RunConfig, migrate_config(values))
        return settings_of(config), config
    except (ConfigError, AttributeError, TypeError):  # of a newer version, or edited
        return {name: value for old, value in leaves(values) if (name := migrate_field(old)) is not None}, None


def settings_of(config: RunConfig) -> dict[str, Any]:
    return dict(leaves(to_dict(config)))


def check_finite(path: Path, values: Any) -> None:
    """JSON has no infinity, but 1e999 is read as one, and no mean or page can hold it."""
    if finite(values) != values:
        raise RunError(f"{path}: holds an infinite number; the file is damaged")
