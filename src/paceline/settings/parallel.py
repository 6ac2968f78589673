"""How a step is carried out by several processes. No torch. Alone, a process does none of it."""

from dataclasses import dataclass
from typing import Annotated, Literal

from paceline.settings.limits import UP_TO_A_YEAR, Limited, at_least


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(Limited, prefix="--parallel."):
    """What torchrun's processes do about each other. Nothing here changes a result."""

    bucket_views: bool = True
    """Gradients are views of the communication buckets, which saves one copy of them."""
    zero1: bool = False
    """Each rank keeps Adam's moments of its share of the rows of the embedding tables and the head, updates those, and
    all gather the rest. To the bit the same run, and checkpoints are the same files for any number of ranks. Saves the
    moments' memory but for one share (record 18 on eight ranks: 0.8 GB each). Costs a gather of the tables a step, and
    to save a checkpoint every rank takes part and holds one whole moment of one table at a time."""
    fsdp: bool = False
    """Each rank keeps its share of the rows of all weights, gradients and optimizer state, Muon's too, and blocks are
    gathered as they are needed: for models that outgrow one device. The same run up to rounding, and the same
    checkpoints, which any number of ranks resumes with or without it. Takes the place of `zero1`. Costs two
    gathers of all weights a micro-batch."""
    context_parallel: Annotated[int, at_least(1).saying("1 splits none")] = 1
    """Ranks that share one sequence, each a slice of whole blocks of 128 tokens; ranks over this number share the
    batch. Attention fetches what its window sees to the left. For sequences that outgrow one device, in presets with a
    window; the same run up to rounding. A micro-batch is counted over all ranks of a sequence."""
    timeout_s: Annotated[float, UP_TO_A_YEAR.saying("1800 is half an hour")] = 1800.0
    """Seconds that a rank waits for the others before it gives up. Saving and compiling must fit in."""
    start_timeout_s: Annotated[float, UP_TO_A_YEAR.saying("300 is 5 minutes")] = 300.0
    """The same at the start, where ranks meet before anything is loaded."""

    @property
    def collective_forward(self) -> str | None:
        """The flag by which a forward pass needs all ranks, if one does."""
        if self.fsdp:
            return "--parallel.fsdp"
        return f"--parallel.context-parallel {self.context_parallel}" if self.context_parallel > 1 else None


@dataclass(frozen=True, kw_only=True)
class SlurmConfig(Limited, prefix="--slurm."):
    """The job that `--launch slurm` hands in."""

    partition: str | None = None
    """Slurm's partition; None: its default."""
    nodes: Annotated[int, at_least(1)] = 1
    """Machines."""
    gpus: Annotated[int, at_least(0)] = 0
    """GPUs of each machine, with a rank each; 0: one rank on its CPU."""
    cpus_per_rank: Annotated[int, at_least(1)] = 4
    """Cores of each rank."""
    minutes: Annotated[int, at_least(1)] = 60
    """After which Slurm ends the job."""
    logs: str = "runs/slurm"
    """Folder for what ranks print; all machines must see it."""
    cluster: Literal["slurm", "local"] = "slurm"
    """`local` starts the same tasks on this machine, to try a command out."""

    @property
    def ranks_per_node(self) -> int:
        return max(1, self.gpus)
