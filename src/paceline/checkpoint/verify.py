"""Is every byte of a run or a checkpoint still what was written? No torch.

What has a hash is compared with it; the files beside the checkpoints have none and are read by the rules of their kind.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from paceline.checkpoint.manifest import MANIFEST, STATE, check_files
from paceline.checkpoint.run_folder import RunFolder
from paceline.core.errors import PacelineError, RunError
from paceline.core.schema import read_json
from paceline.data.verify import FileCheck, Verification
from paceline.metrics.card import CARD_FILE, read_card
from paceline.metrics.records import METRICS_FILE, read_metrics
from paceline.metrics.sinks import missing_lines


def is_checkpoint(path: Path) -> bool:
    return (path / MANIFEST).is_file()


def verify_checkpoint(folder: Path, *, prefix: str = "") -> Verification:
    """Every file that the manifest names, and the manifest itself."""
    checks = check_files(folder).items()
    return Verification(
        files=tuple(FileCheck(file=f"{prefix}{name}", hashed=True, problem=problem) for name, problem in checks)
    )


def verify_run(run: RunFolder, parse_config: Callable[[Any], object]) -> Verification:
    """Config, card, metrics and every checkpoint. `parse_config` raises an error of ours at a config that this version
    does not understand."""
    readers: dict[str, Callable[[], object]] = {
        run.config.name: lambda: parse_config(run.read_config()),
        CARD_FILE: lambda: read_card(run.path),
        METRICS_FILE: lambda: _read_whole_metrics(run),
    }
    checks = [_read(run.path / name, read) for name, read in readers.items()]
    return Verification(files=(*checks, *_checkpoints(run)))


def _read_whole_metrics(run: RunFolder) -> None:
    """Every line, and as many of them as each checkpoint was saved after."""
    read_metrics(run.path)
    for folder in reversed(run.checkpoints()):
        if (missing := missing_lines(run.metrics, _metrics_bytes(folder), folder.name)) is not None:
            raise RunError(missing)


def _metrics_bytes(checkpoint: Path) -> int:
    """0 if the checkpoint cannot tell; then it is damaged, which its own files are named for."""
    try:
        return int(read_json(checkpoint / STATE)["metrics_bytes"])
    except (PacelineError, KeyError, TypeError, ValueError):
        return 0


def _checkpoints(run: RunFolder) -> Iterator[FileCheck]:
    for folder in run.checkpoints():
        yield from verify_checkpoint(folder, prefix=f"{folder.parent.name}/{folder.name}/").files


def _read(path: Path, read: Callable[[], object]) -> FileCheck:
    try:
        read()
    except PacelineError as error:
        return FileCheck(file=path.name, problem=str(error).removeprefix(f"{path}: "))
    return FileCheck(file=path.name)
