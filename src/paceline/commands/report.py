"""`paceline report`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.checkpoint.run_folder import open_run
from paceline.core.command_line import Positional, parse

HELP = """Write one self-contained page about one run or several.

example: paceline report runs/demo runs/demo-2 --out compare.html"""


@dataclass(frozen=True, kw_only=True)
class ReportArgs:
    runs: Positional[tuple[str, ...]] = ("latest",)
    """Folders of runs, their names under runs/, or `latest`."""
    out: Path | None = None
    """File to write; by default report.html in the run's folder, or here when there are several runs."""


def report(argv: Sequence[str]) -> int:
    arguments = parse(ReportArgs, argv, verb="report", description=HELP)
    from paceline.report.page import write_report

    runs = [open_run(name) for name in arguments.runs]
    default = runs[0].report if len(runs) == 1 else Path("report.html")
    print(write_report([run.path for run in runs], arguments.out or default))
    return 0
