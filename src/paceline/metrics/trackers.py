"""TensorBoard, Weights & Biases and trackio, each by one flag, none needed.

A library is imported on its tracker's thread, where whatever it does cannot stop the run. Only one that is not
installed at all is refused, before the run starts: its flag was a mistake that can be mended at once. A resumed run
goes on in the same place; steps that are made again have the bits they had, so it does no harm that the online trackers
keep the first value of each.
"""

import hashlib
import importlib
import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.core.errors import ConfigError
from paceline.metrics.apart import Apart
from paceline.metrics.config import MetricsConfig

TENSORBOARD_FOLDER = "tensorboard"


@dataclass(frozen=True, kw_only=True)
class Tracked:
    """What a tracker is told of a run."""

    folder: Path
    name: str
    started: str
    """Date and time of the first launch."""
    start_step: int
    settings: Mapping[str, Any]

    @property
    def id(self) -> str:
        """The same for every launch of a run, and no other run's."""
        return hashlib.blake2b(f"{self.name} {self.started}".encode(), digest_size=8).hexdigest()


class TensorBoard:
    def __init__(self, run: Tracked) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # what a launch that was killed wrote after its last checkpoint is hidden; a record's step counts updates done
        first = run.start_step + 1 if run.start_step else None
        self._writer = SummaryWriter(str(run.folder / TENSORBOARD_FOLDER), purge_step=first)

    def log(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class Wandb:
    def __init__(self, project: str, run: Tracked) -> None:
        wandb = importlib.import_module("wandb")
        self._run = wandb.init(
            project=project,
            name=run.name,
            id=run.id,
            resume="allow",
            dir=str(run.folder),
            config=dict(run.settings),
            settings=wandb.Settings(console="off", silent=True),  # the console is ours
        )

    def log(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step)

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """Its runs are known by their names, so the id is part of it."""

    def __init__(self, project: str, run: Tracked) -> None:
        trackio = importlib.import_module("trackio")
        self._run = trackio.init(
            project=project, name=f"{run.name}-{run.id[:6]}", config=dict(run.settings), resume="allow"
        )

    def log(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step)

    def close(self) -> None:
        self._run.finish()


def check_installed(config: MetricsConfig) -> None:
    """Raise ConfigError for a tracker that is asked for and not there."""
    wanted = (("tensorboard", "tb", config.tensorboard), ("wandb", "wandb", config.wandb is not None),
              ("trackio", "trackio", config.trackio is not None))  # fmt: skip
    for package, extra, asked in wanted:
        if asked and importlib.util.find_spec(package) is None:
            raise ConfigError(f"--metrics.{package} needs {package}; pip install 'paceline[{extra}]'")


def trackers(config: MetricsConfig, run: Tracked) -> Iterator[Apart]:
    """The trackers that `config` asks for, each on its thread."""
    if config.tensorboard:
        yield Apart("tensorboard", lambda: TensorBoard(run))
    if (project := config.wandb) is not None:
        yield Apart("wandb", lambda: Wandb(project, run))
    if (name := config.trackio) is not None:
        yield Apart("trackio", lambda: Trackio(name, run))
