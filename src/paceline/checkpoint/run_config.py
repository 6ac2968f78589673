"""The config of a run: from its own file or, if that is not what was written, from its newest checkpoint. No torch."""

from collections.abc import Callable
from typing import Any, TypeVar

from paceline.checkpoint.manifest import CONFIG, newest_good
from paceline.checkpoint.run_folder import RunFolder
from paceline.core.errors import PacelineError, RunError
from paceline.core.schema import read_json

T = TypeVar("T")


def read_run_config(run: RunFolder, parse: Callable[[Any], T]) -> tuple[T, str | None]:
    """What `parse` makes of the run's config, and a line about where it was found, if not where it should be. A file
    that is missing, damaged or of a newer version is one at which reading or `parse` raises an error of ours."""
    try:
        return parse(run.read_config()), None
    except PacelineError as error:
        trouble = error
    try:
        folder, _ = newest_good(run, usable=lambda folder: parse(read_json(folder / CONFIG)))
    except RunError:
        raise trouble from None
    return parse(read_json(folder / CONFIG)), f"{trouble}; the config is taken from {folder.name}"
