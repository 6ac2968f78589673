"""`paceline watch`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.checkpoint.run_folder import RUNS
from paceline.core.command_line import Positional, parse
from paceline.core.errors import ConfigError

HELP = """Show the runs of a folder in the browser while they are trained. Only this machine can reach the page.

example: paceline watch runs --port 8008

From elsewhere, through a tunnel: ssh -L 8008:localhost:8008 HOST, then http://localhost:8008/."""


@dataclass(frozen=True, kw_only=True)
class WatchArgs:
    folder: Positional[Path] = RUNS
    """Where the runs are, or will be; an ablation's folder, or a run's own, will do, too."""
    port: int = 8008
    """Of the page; 0 takes any that is free."""
    newest: int = 24
    """Runs to show: those written to last."""

    def __post_init__(self) -> None:
        if self.newest < 1:
            raise ConfigError(f"--newest {self.newest} must be at least 1")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port {self.port} is outside [0, 65535]")
        if self.folder.exists() and not self.folder.is_dir():
            raise ConfigError(f"{self.folder}: is a file; give the folder of runs")


def watch(argv: Sequence[str]) -> int:
    arguments = parse(WatchArgs, argv, verb="watch", description=HELP)
    from paceline.lab import statistics
    from paceline.report.watch import make_server

    server = make_server(arguments.folder, port=arguments.port, newest=arguments.newest, statistics=statistics)
    with server:
        print(f"http://localhost:{server.server_port}/ shows {arguments.folder}; Ctrl-C ends", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return 0
    return 0
