"""`paceline verify PATH`."""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from paceline.core.command_line import Positional, parse
from paceline.core.errors import RunError

if TYPE_CHECKING:
    from paceline.data.verify import Verification

HELP = """Check every hash of a run, a checkpoint or prepared data, and name what is damaged or missing.

example: paceline verify runs/demo"""


@dataclass(frozen=True, kw_only=True)
class VerifyArgs:
    path: Positional[Annotated[str, tyro.conf.arg(metavar="[PATH]")]] = "latest"
    """A run (its folder, its name under runs/, or `latest`), a checkpoint, a shard or a folder of shards."""
    json: bool = False
    """Print the result as JSON."""


def verify(argv: Sequence[str]) -> int:
    """0 when all is well, 1 when something is damaged or missing."""
    arguments = parse(VerifyArgs, argv, verb="verify", description=HELP)
    path, result = _verified(arguments.path)
    if arguments.json:
        print(json.dumps({"ok": result.ok, **dataclasses.asdict(result)}, indent=1))
        return 0 if result.ok else 1
    for check in result.problems:
        print(f"{check.file}: {check.problem}")
    unhashed = sum(not check.hashed for check in result.files if not check.problem)
    note = f" ({unhashed} without a hash were only read)" if unhashed else ""
    verdict = "ok" if result.ok else f"{len(result.problems)} damaged or missing"
    print(f"{path}: {len(result.files)} files, {verdict}{note}")
    return 0 if result.ok else 1


def _verified(given: str) -> "tuple[Path, Verification]":
    """What the path turns out to be, checked by the rules of its kind."""
    from paceline.checkpoint.run_folder import open_run
    from paceline.checkpoint.verify import is_checkpoint, verify_checkpoint, verify_run
    from paceline.core.schema import from_dict
    from paceline.data.manifest import FILE_NAME
    from paceline.data.verify import verify as verify_data
    from paceline.train.config import RunConfig

    path = Path(given)
    if is_checkpoint(path):
        return path, verify_checkpoint(path)
    if path.is_file() or (path / FILE_NAME).exists() or any(path.glob("*.bin")):
        return path, verify_data(path)
    try:
        run = open_run(given)
    except RunError as error:
        raise RunError(f"{error}; to verify something else, name a checkpoint or a folder of shards") from None
    return run.path, verify_run(run, lambda found: from_dict(RunConfig, found))
