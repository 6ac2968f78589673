"""An ablation on this machine: the device of its runs, how many go at a time, the folder that is ours meanwhile.

Behind `paceline ablate` and `paceline.ablate`, which differ in what they print. No torch.
"""

import contextlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from paceline.core.environment import environment, usable_cores
from paceline.core.errors import ConfigError, UserError
from paceline.lab.ablate.children import Launch, local_launch, locked
from paceline.lab.ablate.outcomes import outcomes
from paceline.lab.ablate.plan import Plan, keep_plan
from paceline.lab.ablate.result import Ablation, conclude, write_ablation
from paceline.lab.ablate.schedule import Series
from paceline.train.config import RunConfig


def device_of(config: RunConfig) -> str:
    """What runs here will choose, as far as can be told without importing torch."""
    if config.train.device != "auto":
        return config.train.device
    torch = sys.modules.get("torch")
    has_gpu = "gpu" in environment() if torch is None else torch.cuda.is_available()
    return "cuda" if has_gpu else "cpu"


def jobs_here(plan: Plan, wanted: int | None) -> int:
    """How many runs at a time; a GPU is never shared."""
    gpus = _gpus(plan)
    if gpus and wanted is not None and wanted > len(gpus):
        raise ConfigError(
            f"--jobs {wanted} exceeds the {len(gpus)} GPUs here, and runs do not share one; use --jobs {len(gpus)}, or "
            f"--train.device cpu"
        )
    return wanted or max(1, len(gpus))


def _gpus(plan: Plan) -> list[str]:
    """What to write into CUDA_VISIBLE_DEVICES, one for each GPU that we may use."""
    if plan.choice.device != "cuda":
        return []
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name.strip() for name in visible.split(",") if name.strip()]
    return [str(number) for number in range(int(environment().get("gpu_count", 1)))]


@contextlib.contextmanager
def opened(plan: Plan, folder: Path) -> Iterator[tuple[Series, int | None]]:
    """How the planned runs stand in `folder`, and the lock by which it is ours while the block runs. A folder that was
    begun with another plan is refused."""
    if importlib.util.find_spec("scipy") is None:  # better told before the runs than after them
        raise UserError("paceline ablate needs scipy for its intervals: pip install 'paceline[report]'")
    with locked(folder) as lock:
        keep_plan(plan, folder)
        yield Series(folder, {one.run.name: one for one in outcomes(plan.runs, folder)}), lock


def launch_here(plan: Plan, jobs: int, lock: int | None) -> Launch:
    """Runs as processes on this machine; those that share its cores get an equal number of them."""
    gpus = _gpus(plan)
    threads = max(1, usable_cores() // jobs) if jobs > 1 and not gpus else None
    return local_launch(gpus=gpus, threads=threads, lock=lock)


def concluded(plan: Plan, series: Series) -> Ablation:
    """What the runs say, also written into their folder."""
    ablation = conclude(plan, outcomes(plan.runs, series.folder), series.failed)
    write_ablation(ablation, series.folder)
    return ablation
