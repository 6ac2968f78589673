"""How a step is carried out by several processes. No torch. Alone, a process does none of it."""

from dataclasses import dataclass
from typing import Literal

from paceline.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """What torchrun's processes do about each other. Nothing here changes a result."""

    bucket_views: bool = True
    """Gradients are views of the communication buckets, which saves one copy of them."""
    broadcast_buffers: bool = False
    """Send the first rank's buffers to all before the first forward pass of each step; ours never change, so off."""
    shard_adam: bool = False
    """Each rank keeps Adam's moments of its share of the rows of the embedding tables and the head, updates those, and
    all gather the rest. To the bit the same run, and checkpoints are the same files for any number of ranks. Saves the
    moments' memory but for one share (record 18 on eight ranks: 0.8 GB each). Costs a gather of the tables a step, and
    to save a checkpoint every rank takes part and holds one whole moment of one table at a time."""
    fully_shard: bool = False
    """Each rank keeps its share of the rows of all weights, gradients and optimizer state, Muon's too, and blocks are
    gathered as they are needed: for models that outgrow one device. The same run up to rounding, and the same
    checkpoints, which any number of ranks resumes with or without it. Takes the place of `shard_adam`. Costs two
    gathers of all weights a micro-batch."""
    split_sequence: int = 1
    """Ranks that share one sequence, each a slice of whole blocks of 128 tokens; ranks over this number share the
    batch. Attention fetches what its window sees to the left. For sequences that outgrow one device, in presets with a
    window; the same run up to rounding. A micro-batch is counted over all ranks of a sequence."""
    timeout_s: float = 1800.0
    """Seconds that a rank waits for the others before it gives up. Saving and compiling must fit in."""
    start_timeout_s: float = 300.0
    """The same at the start, where ranks meet before anything is loaded."""

    @property
    def talks_inside(self) -> str | None:
        """The flag by which ranks talk to each other inside of a forward pass, if one does."""
        if self.fully_shard:
            return "--parallel.fully-shard"
        return f"--parallel.split-sequence {self.split_sequence}" if self.split_sequence > 1 else None

    def __post_init__(self) -> None:
        if self.split_sequence < 1:
            raise ConfigError(f"--parallel.split-sequence {self.split_sequence} must be at least 1, which splits none")
        if not self.timeout_s > 0:
            raise ConfigError(f"--parallel.timeout-s {self.timeout_s} must be above 0; 1800 is half an hour")
        if not self.start_timeout_s > 0:
            raise ConfigError(f"--parallel.start-timeout-s {self.start_timeout_s} must be above 0; 300 is 5 minutes")


@dataclass(frozen=True, kw_only=True)
class SlurmConfig:
    """The job that `--launch slurm` hands in."""

    partition: str | None = None
    """Slurm's partition; None: its default."""
    nodes: int = 1
    """Machines."""
    gpus: int = 0
    """GPUs of each machine, with a rank each; 0: one rank on its CPU."""
    cpus_per_rank: int = 4
    """Cores of each rank."""
    minutes: int = 60
    """After which Slurm ends the job."""
    logs: str = "runs/slurm"
    """Folder for what ranks print; all machines must see it."""
    cluster: Literal["slurm", "local"] = "slurm"
    """`local` starts the same tasks on this machine, to try a command out."""

    def __post_init__(self) -> None:
        for name, least in (("nodes", 1), ("gpus", 0), ("cpus_per_rank", 1), ("minutes", 1)):
            if (value := getattr(self, name)) < least:
                raise ConfigError(f"--slurm.{name.replace('_', '-')} {value} must be at least {least}")

    @property
    def ranks_per_node(self) -> int:
        return max(1, self.gpus)
