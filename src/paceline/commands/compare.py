"""`paceline compare` and `paceline board`, without torch."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import tyro

from paceline.checkpoint.run_folder import RUNS, open_run
from paceline.core.command_line import Positional, parse
from paceline.core.errors import ConfigError, RunError
from paceline.metrics.card import CARD_FILE

COMPARE_HELP = """Say what finished runs show: spread, noise floor, whether the mean loss is at most a target, which
groups differ, how many more runs would settle it.

example: paceline compare runs/a-0 runs/a-1 runs/b-0 runs/b-1 --target 3.28

Runs that differ in the seed only form a group. Each look is noted in .looks.json beside the runs, because stopping at
the first look that pleases is not one test; say --planned N at the first look, and only the N-th run decides."""

BOARD_HELP = """Rank the runs of a track by train time to the target, with their evidence.

example: paceline board runs --track en-140M

Runs whose data or rules differ from the track's are refused by name."""


@dataclass(frozen=True, kw_only=True)
class CompareArgs:
    runs: Positional[Annotated[tuple[str, ...], tyro.conf.arg(metavar="RUN [RUN ...]")]]
    """Folders of runs, or their names under runs/."""
    target: float | None = None
    """Test that the mean loss is at most this, by the records' rule (p < 0.01)."""
    planned: int | None = None
    """Runs of each group that were planned before the first result was seen."""
    json: bool = False
    """For programs."""


@dataclass(frozen=True, kw_only=True)
class BoardArgs:
    folders: Positional[tuple[Path, ...]] = (RUNS,)
    """Folders with runs, at any depth."""
    track: str | None = None
    """Which track; by default the one that the runs name."""
    target: float | None = None
    """Loss to reach; by default the track's own."""
    json: bool = False
    """For programs."""


def compare(argv: Sequence[str]) -> int:
    arguments = parse(CompareArgs, argv, verb="compare", description=COMPARE_HELP)
    _check_target(arguments.target)
    if not arguments.runs:
        raise RunError("no run was given to compare; name some, such as runs/demo runs/demo-2")
    if arguments.planned is not None and arguments.planned < 2:
        raise ConfigError(f"--planned {arguments.planned} must be at least 2; one run shows no spread")
    from paceline.lab.compare.compare import compare as compare_runs
    from paceline.lab.compare.show import show_comparison

    found = compare_runs([_folder(run) for run in arguments.runs], target=arguments.target, planned=arguments.planned)
    if arguments.json:
        print(json.dumps(asdict(found), indent=1))
    else:
        show_comparison(found)
    return 0


def board(argv: Sequence[str]) -> int:
    arguments = parse(BoardArgs, argv, verb="board", description=BOARD_HELP)
    _check_target(arguments.target)
    for folder in arguments.folders:
        if not folder.is_dir():
            raise RunError(f"{folder}: no such folder; name one that holds runs, such as {RUNS}")
    from paceline.lab.compare.board import board as board_of
    from paceline.lab.compare.show import show_board

    found = board_of(arguments.folders, track=arguments.track, target=arguments.target)
    if arguments.json:
        print(json.dumps(asdict(found), indent=1))
    else:
        show_board(found)
    return 0


def _folder(run: str) -> Path:
    """A folder with a card is enough, even if the rest of the run was not kept."""
    return Path(run) if (Path(run) / CARD_FILE).exists() else open_run(run).path


def _check_target(target: float | None) -> None:
    if target is not None and not math.isfinite(target):
        raise ConfigError(f"--target {target} is not a loss; give a number such as 3.28")
