"""`paceline report`: the command line's side of the page. No torch."""

from dataclasses import dataclass
from pathlib import Path

import tyro

from paceline.metrics.card import find_run
from paceline.report.page import write_report

REPORT_FILE = "report.html"


@dataclass(frozen=True, kw_only=True)
class ReportArgs:
    """Write one page about one run or several. Example: paceline report runs/demo runs/demo-2 --out compare.html"""

    runs: tyro.conf.Positional[tuple[str, ...]]
    """Folders of runs, their names inside runs/, or `latest`."""
    out: Path | None = None
    """File to write; by default report.html in the run's folder, or here when there are several runs."""


def run_report(args: ReportArgs) -> int:
    folders = [find_run(name) for name in args.runs]
    default = folders[0] / REPORT_FILE if len(folders) == 1 else Path(REPORT_FILE)
    print(write_report(folders, args.out or default))
    return 0
