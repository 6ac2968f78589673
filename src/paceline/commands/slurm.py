"""`paceline train … --launch slurm`: the same command, one process a rank, as a job of Slurm's, through submitit, which
gives each rank its place in the variables that torchrun sets."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.core.errors import UserError, optional_module
from paceline.settings.parallel import SlurmConfig


def submit(argv: Sequence[str], config: SlurmConfig, *, name: str) -> Any:
    """Hand in `paceline train` with these words and say where to look; submitit's job, for who wants to wait."""
    try:
        executor = _submitit().AutoExecutor(folder=config.logs, cluster=config.cluster)
    except RuntimeError as error:  # submitit's answer where there is no Slurm
        raise UserError(f"--launch slurm cannot be used here: {error}; use --launch local, or torchrun") from None
    executor.update_parameters(
        name=name,
        nodes=config.nodes,
        tasks_per_node=config.ranks_per_node,
        gpus_per_node=config.gpus,
        cpus_per_task=config.cpus_per_rank,
        timeout_min=config.minutes,
        **({} if config.partition is None else {"slurm_partition": config.partition}),
    )
    job = executor.submit(run_rank, [*argv, "--launch", "local"])  # the last one counts
    print(f"job {job.job_id}: {config.nodes} x {config.ranks_per_node} ranks; logs in {config.logs}")
    return job


def run_rank(argv: Sequence[str]) -> None:
    """One task of the job: this rank, in a process that ends as any other does."""
    place = _submitit().helpers.TorchDistributedEnvironment().export(set_cuda_visible_devices=False)
    code = subprocess.run([sys.executable, "-m", "paceline.cli", "train", *argv], check=False).returncode
    if code:  # so that Slurm counts the task as failed; the line that says why is in the log
        raise RuntimeError(f"rank {place.rank} of {place.world_size} ended with exit code {code}")


class SlurmChild:
    """A job as `lab.ablate.schedule` sees a child process: waited for, its words in a file, ended."""

    def __init__(self, job: Any, log: Path) -> None:
        self.job, self.log = job, log

    def poll(self) -> int | None:
        if not self.job.done():
            return None
        self.log.write_text(f"{self.job.stdout() or ''}{self.job.stderr() or ''}", encoding="utf-8")
        return 1 if self.job.exception() else 0

    def ask_to_stop(self) -> None:
        self.job.cancel()  # Slurm's signal acts as Ctrl-C does

    kill = ask_to_stop


def _submitit() -> Any:
    return optional_module("submitit", UserError("--launch slurm needs submitit: pip install 'paceline[slurm]'"))
