"""`paceline compare`, `board`, `report` and `watch`: what runs show, without torch."""

import contextlib
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import tyro

from paceline.analysis.ablation import ABLATION_FILE, read_ablation
from paceline.checkpoint.run_folder import RUNS, RunFolder, open_run
from paceline.commands.output import JsonArgs, answer, say
from paceline.core.command_line import Positional, parse
from paceline.core.errors import ConfigError, RunError
from paceline.metrics.card import CARD_FILE
from paceline.settings.limits import PORT, Limit, Limited, at_least

COMPARE_HELP = """Say what finished runs show: spread, noise floor, whether the mean loss is at most a target, which
groups differ, how many more runs would settle it.

example: paceline compare runs/a-0 runs/a-1 runs/b-0 runs/b-1 --target 3.28

Runs that differ in the seed only form a group. Each look is recorded in .looks.json beside the runs, because optional
stopping inflates false positives; give --planned N at the first look, and only the N-th run decides."""
BOARD_HELP = """Rank the runs of a track by train time to the target, with their evidence.

example: paceline board runs --track en-140M

Runs whose data or rules differ from the track's are refused by name."""
REPORT_HELP = """Write one page about runs and ablations, seeds of one configuration together.

example: paceline report runs/demo runs/demo-2 --out compare.html"""
WATCH_HELP = """Show the runs of a folder in the browser while they are trained. Only this machine can reach the page.

example: paceline watch runs --port 8008

From elsewhere, through a tunnel: ssh -L 8008:localhost:8008 HOST, then http://localhost:8008/."""

LOSS = Limit("is not a loss; give a number such as 3.28", math.isfinite)


@dataclass(frozen=True, kw_only=True)
class JudgedArgs(JsonArgs, Limited, prefix="--"):
    target: Annotated[float | None, LOSS] = None
    """Test that the mean loss is at most this, by the records' rule (p < 0.01). None: no test; of a board, the loss of
    its track."""
    with_remade: bool = False
    """Count also runs of which a part was made again by --rewind or --restart."""


@dataclass(frozen=True, kw_only=True)
class CompareArgs(JudgedArgs):
    runs: Positional[Annotated[tuple[str, ...], tyro.conf.arg(metavar="RUN [RUN ...]")]]
    """Folders of runs or of ablations, or their names under runs/; files beside them are passed over."""
    planned: Annotated[int | None, at_least(2).saying("one run shows no spread")] = None
    """Runs of each group that were planned before the first result was seen."""


@dataclass(frozen=True, kw_only=True)
class BoardArgs(JudgedArgs):
    folders: Positional[tuple[Path, ...]] = (RUNS,)
    """Folders with runs, at any depth."""
    track: str | None = None
    """Which track; by default the one that the runs name."""


@dataclass(frozen=True, kw_only=True)
class ReportArgs:
    runs: Positional[Annotated[tuple[str, ...], tyro.conf.arg(metavar="[RUN ...]")]] = ("latest",)
    """Folders of runs or ablations, their names under runs/, or `latest`."""
    out: Path | None = None
    """File to write; by default report.html in the folder given, or here when there are several."""
    self_contained: bool = False
    """Put the chart library (4.8 MB) into the page, for one file to send; otherwise it lies beside the runs once."""


@dataclass(frozen=True, kw_only=True)
class WatchArgs(Limited, prefix="--"):
    folder: Positional[Path] = RUNS
    """Where the runs are, or will be; an ablation's folder, or a run's own, will do, too."""
    port: Annotated[int, PORT] = 8008
    """Of the page; 0 takes any that is free."""
    newest: Annotated[int, at_least(1)] = 24
    """Runs to show: those written to last."""

    def check(self) -> None:
        if self.folder.exists() and not self.folder.is_dir():
            raise ConfigError(f"{self.folder}: is a file; give the folder of runs")


def compare(argv: Sequence[str]) -> int:
    arguments = parse(CompareArgs, argv, verb="compare", description=COMPARE_HELP)
    if not arguments.runs:
        raise RunError("no run was given to compare; name some, such as runs/demo runs/demo-2")
    from paceline.lab.compare.compare import compare as compare_runs
    from paceline.lab.compare.comparison_text import show_comparison

    folders = [folder for run in _folders_given(arguments.runs) for folder in _run_folders(run)]
    found = compare_runs(folders, target=arguments.target, planned=arguments.planned, remade=arguments.with_remade)
    return answer(asdict(found), lambda: show_comparison(found), as_json=arguments.json)


def board(argv: Sequence[str]) -> int:
    arguments = parse(BoardArgs, argv, verb="board", description=BOARD_HELP)
    for folder in arguments.folders:
        if not folder.is_dir():
            raise RunError(f"{folder}: no such folder; name one that holds runs, such as {RUNS}")
    from paceline.lab.compare.board import board as board_of
    from paceline.lab.compare.comparison_text import show_board

    found = board_of(arguments.folders, track=arguments.track, target=arguments.target, remade=arguments.with_remade)
    return answer(asdict(found), lambda: show_board(found), as_json=arguments.json)


def _folders_given(names: Sequence[str]) -> Sequence[str]:
    """Without files: logs, pages and an ablation's plan lie beside runs, and `runs/*` names them, too."""
    return [name for name in names if not Path(name).is_file()] or names


def _run_folders(name: str) -> list[Path]:
    """A folder with a card is enough, even if the rest of the run was not kept; of an ablation, all its runs."""
    for path in (Path(name), RUNS / name):
        if (path / CARD_FILE).exists():
            return [path]
        if (path / ABLATION_FILE).is_file():
            planned = [path / run for arm in read_ablation(path).arms for run in arm.runs]
            return [run for run in planned if (run / CARD_FILE).exists()]
    return [open_run(name).path]


def report(argv: Sequence[str]) -> int:
    arguments = parse(ReportArgs, argv, verb="report", description=REPORT_HELP)
    from paceline.report.page import write_report

    folders = [_folder(name) for name in _folders_given(arguments.runs)]
    out = arguments.out or (RunFolder(folders[0]).report if len(folders) == 1 else Path("report.html"))
    subject = write_report(folders, out, self_contained=arguments.self_contained)
    for sentence in subject.left_out:
        say(f"left out: {sentence}")
    print(out)
    return 0


def _folder(name: str) -> Path:
    """A folder that exists is taken as it is: the page names what is wrong with it, if other runs can be shown."""
    there = [path for path in (Path(name), RUNS / name) if path.is_dir()]
    return there[0] if there else open_run(name).path


def watch(argv: Sequence[str]) -> int:
    arguments = parse(WatchArgs, argv, verb="watch", description=WATCH_HELP)
    from paceline.report.watch import make_server

    server = make_server(arguments.folder, port=arguments.port, newest=arguments.newest)
    with server, contextlib.suppress(KeyboardInterrupt):
        print(f"http://localhost:{server.server_port}/ shows {arguments.folder}; Ctrl-C ends", flush=True)
        server.serve_forever()
    return 0
