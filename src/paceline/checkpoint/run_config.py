"""The config of a run: from its own file or, if that is not what was written, from its newest checkpoint. No torch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from paceline.checkpoint.manifest import CONFIG, read_manifest
from paceline.checkpoint.run_folder import RunFolder
from paceline.core.errors import ConfigError, PacelineError
from paceline.core.files import blake2b_of
from paceline.core.schema import changes, read_json

T = TypeVar("T")


def read_run_config(run: RunFolder, parse: Callable[[Any], T], *, may_change: tuple[str, ...]) -> tuple[T, str | None]:
    """What `parse` makes of the run's config, and a line about where it was found, if not where it should be. A file
    that is missing, damaged or of a newer version is one at which reading or `parse` raises an error of ours. The
    file has no hash, but a checkpoint's copy has: where they differ in more than the fields that `may_change` begins,
    the copy is right."""
    saved = _newest_saved(run, parse)
    try:
        found = parse(run.read_config())
        if saved is not None:
            _check_same(run, found, saved[1], may_change)
        return found, None
    except PacelineError as error:
        if saved is None:
            raise
        return saved[1], f"{error}; the config is taken from {saved[0].name}"


def _newest_saved(run: RunFolder, parse: Callable[[Any], T]) -> tuple[Path, T] | None:
    """Of the newest checkpoint whose config has its hash and is understood; its other files are not looked at."""
    for folder in reversed(run.checkpoints()):
        try:
            entry = next((entry for entry in read_manifest(folder).files if entry.name == CONFIG), None)
            if entry is not None and blake2b_of(folder / CONFIG) == entry.blake2b:
                return folder, parse(read_json(folder / CONFIG))
        except (PacelineError, OSError):
            continue
    return None


def _check_same(run: RunFolder, found: object, saved: object, may_change: tuple[str, ...]) -> None:
    for change in changes(saved, found):
        if not change.field.startswith(may_change):
            raise ConfigError(f"{run.config}: {change.field} is {change.after}, but was {change.before}")
