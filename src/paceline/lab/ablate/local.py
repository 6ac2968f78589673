"""An ablation on this machine, from its plan to its result: behind `paceline ablate` and `paceline.ablate`. No torch.

A run is a process with a session of its own, so that Ctrl-C reaches it through us alone and once: it then saves and
ends well. It inherits the lock of the ablation's folder and so keeps it if we are killed; nobody starts a second
process in the same run folder while it lives.
"""

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from paceline.analysis.ablation import Ablation, write_ablation
from paceline.core.environment import environment, usable_cores
from paceline.core.errors import ConfigError, UserError
from paceline.core.lock import only_writer
from paceline.lab.ablate.ablation_text import Progress, show_plan
from paceline.lab.ablate.arms import Plan, keep_plan
from paceline.lab.ablate.effects import conclude
from paceline.lab.ablate.outcomes import outcomes
from paceline.lab.ablate.schedule import Child, Launch, Series, carry_out
from paceline.settings.run import RunConfig


def device_of(config: RunConfig) -> str:
    """What runs here will choose, as far as known without importing torch."""
    if config.train.device != "auto":
        return config.train.device
    torch = sys.modules.get("torch")
    has_gpu = "gpu" in environment() if torch is None else torch.cuda.is_available()
    return "cuda" if has_gpu else "cpu"


def jobs_at_a_time(plan: Plan, wanted: int | None, *, local: bool = True) -> int:
    """How many runs at a time; a GPU is never shared. Not local: Slurm decides, so all may wait there."""
    if wanted is not None and wanted < 1:
        raise ConfigError(f"--jobs {wanted} must be at least 1")
    gpus = _gpus(plan) if local else []
    if gpus and wanted is not None and wanted > len(gpus):
        cure = f"use --jobs {len(gpus)}, or --train.device cpu"
        raise ConfigError(f"--jobs {wanted} exceeds the {len(gpus)} GPUs here, and runs do not share one; {cure}")
    return wanted or (max(1, len(gpus)) if local else len(plan.runs))


def _gpus(plan: Plan) -> list[str]:
    """What to write into CUDA_VISIBLE_DEVICES, one for each GPU that we may use."""
    if plan.choice.device != "cuda":
        return []
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name.strip() for name in visible.split(",") if name.strip()]
    return [str(number) for number in range(int(environment().get("gpu_count", 1)))]


def run_ablation(
    plan: Plan,
    folder: Path,
    *,
    jobs: int,
    console: Console,
    plan_shown: bool = False,
    launch: Launch | None = None,
    keep_checkpoints: bool = False,
) -> Ablation | int:
    """Make the runs that are missing in `folder`, which is ours meanwhile, and write what all of them say. The number
    of a signal that stopped it: the same call goes on. A folder that was begun with another plan is refused."""
    if importlib.util.find_spec("scipy") is None:  # before the runs, not after them
        raise UserError("paceline ablate needs scipy for its intervals: pip install 'paceline[report]'")
    with locked(folder) as lock:
        keep_plan(plan, folder)
        if plan_shown:
            show_plan(plan, console)
        series = Series(folder, {one.run.name: one for one in outcomes(plan.runs, folder)})
        launch = launch or local_launch(gpus=_gpus(plan), jobs=jobs, lock=lock)
        progress = Progress(plan, jobs, console)
        with progress.live or contextlib.nullcontext():
            carry_out(series, launch, jobs=jobs, keep_checkpoints=keep_checkpoints, show=progress)
        if series.stopped_by is not None:
            return series.stopped_by
        ablation = conclude(plan, outcomes(plan.runs, folder), series.failed)
        write_ablation(ablation, folder)
        return ablation


class LocalChild(subprocess.Popen):
    def ask_to_stop(self) -> None:
        self.send_signal(signal.SIGINT)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # a compiler's workers, too
        self.wait()


def local_launch(*, gpus: Sequence[str], jobs: int, lock: int | None) -> Launch:
    """Starts runs here: the one at place i sees `gpus[i]` alone, if any; else each gets its share of cores."""

    def launch(words: Sequence[str], log: Path, place: int) -> Child:
        more = {"CUDA_VISIBLE_DEVICES": gpus[place]} if gpus else {}
        if jobs > 1 and not gpus:
            more["OMP_NUM_THREADS"] = str(max(1, usable_cores() // jobs))
        with open(log, "ab") as file:
            return LocalChild(
                [sys.executable, "-m", "paceline.cli", "train", *words],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **more},
                start_new_session=True,
                pass_fds=() if lock is None else (lock,),
            )

    return launch


def locked(folder: Path) -> contextlib.AbstractContextManager[int | None]:
    """Nobody else works in this folder while the block runs, nor while a child lives that inherited the lock."""
    folder.mkdir(parents=True, exist_ok=True)
    busy = f"--out {folder}: another command, or a run that it started, is at work there; wait until it has ended"
    return only_writer(folder, UserError(busy), inherited=True)
