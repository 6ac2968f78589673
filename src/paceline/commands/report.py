"""`paceline report`."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from paceline.checkpoint.run_folder import RUNS, RunFolder, open_run
from paceline.core.command_line import Positional, parse

HELP = """Write one self-contained page about runs and ablations, seeds of one configuration together.

example: paceline report runs/demo runs/demo-2 --out compare.html

Where a step's time goes: paceline report runs/demo --bench step.json, with a file that
`paceline bench step --out step.json` wrote."""


@dataclass(frozen=True, kw_only=True)
class ReportArgs:
    runs: Positional[Annotated[tuple[str, ...], tyro.conf.arg(metavar="[RUN ...]")]] = ("latest",)
    """Folders of runs or ablations, their names under runs/, or `latest`."""
    bench: tuple[Path, ...] = ()
    """Results of `paceline bench step` to show beside them."""
    out: Path | None = None
    """File to write; by default report.html in the folder given, or here when there are several."""


def report(argv: Sequence[str]) -> int:
    arguments = parse(ReportArgs, argv, verb="report", description=HELP)
    from paceline.lab import statistics
    from paceline.report.page import write_report

    folders = [_folder(name) for name in arguments.runs]
    out = arguments.out or (RunFolder(folders[0]).report if len(folders) == 1 else Path("report.html"))
    subject = write_report(folders, out, benches=arguments.bench, statistics=statistics)
    for sentence in subject.left_out:
        print(f"left out: {sentence}", file=sys.stderr)
    print(out)
    return 0


def _folder(name: str) -> Path:
    """A folder that is there is taken as it is: what is wrong with it is said on the page if others are well."""
    there = [path for path in (Path(name), RUNS / name) if path.is_dir()]
    return there[0] if there else open_run(name).path
