"""The whole of a run as one value. No torch.

`RunConfig` composes the configs of the folders below; what concerns two of them at once is checked here, before any
device is touched.
"""

import math
from dataclasses import dataclass, field
from typing import Literal

from paceline.checkpoint.config import CheckpointConfig
from paceline.core.command_line import Hidden
from paceline.core.errors import ConfigError
from paceline.core.units import BLOCK_TOKENS
from paceline.data.config import BatchConfig, DataConfig
from paceline.evaluate.config import EvaluateConfig
from paceline.kernels.config import AttentionConfig, HeadConfig, MlpConfig
from paceline.metrics.config import MetricsConfig
from paceline.model.config import ModelConfig
from paceline.optim.config import OptimConfig
from paceline.parallel.config import ParallelConfig

MOST_THREADS = 1024
"""Of one process. A few thousand end it without a word."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How the loop runs."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`cuda` refuses a machine without it; the full-size records ask for it."""
    compile: bool = False
    """Compile the model and the optimizer with torch.compile. Pays on a GPU; on a CPU only for long runs."""
    free_steps: int = 10
    """Steps before the train clock starts (the records' rule: compilation and warm-up are not counted there; the wall
    clock counts everything)."""
    deterministic: bool = False
    """Only operations that give the same bits every time, so that a resumed run is the uninterrupted one. A CPU run
    always is. On a GPU: embedding gradients by sorted sums, cuBLAS and PyTorch in their repeatable modes, and no kernel
    chosen by timing it (--train.coordinate-descent is left out)."""
    fast_paths: bool = True
    """Let `auto` choose kernels of our own where they work; off, every back end left to `auto` is PyTorch's, compiled
    or not. The same mathematics either way."""
    cuda_graph: bool = True
    """On one GPU and compiled, replay a micro-batch as one CUDA graph instead of launching its kernels one by one. The
    same kernels either way."""
    recompute: bool = False
    """Recompute each block in the backward pass instead of keeping its activations: less memory, same numbers."""
    memory_limit_gib: float | None = None
    """Memory that a rank may take; None: what its GPU has free, 80 % of what a CPU has free. A GPU is held to it; on a
    CPU the run is cut so that it is foretold to keep it."""
    coordinate_descent: bool = False
    """Let the compiler tune its kernels by coordinate descent: slower to start, sometimes faster to run."""
    skip_guards: bool = False
    """After five steps, stop checking whether compiled code still fits its inputs; they never change shape here."""
    expandable_segments: bool = False
    """Let the CUDA allocator grow its segments, which leaves fewer holes."""
    threads: int | None = None
    """CPU threads; None: all cores. The last bits of a CPU run depend on it."""
    stop_after: int | None = None
    """End this launch well after so many steps and leave the schedule alone; --resume goes on with as many again, or to
    the end with --train.stop-after None."""

    def __post_init__(self) -> None:
        if self.threads is not None and self.threads < 1:
            raise ConfigError(f"--train.threads {self.threads} must be at least 1; None takes all cores")
        if self.threads is not None and self.threads > MOST_THREADS:
            raise ConfigError(
                f"--train.threads {self.threads} exceeds {MOST_THREADS}, and systems refuse to make so many; None "
                f"takes all cores"
            )
        if self.memory_limit_gib is not None and not 0 < self.memory_limit_gib < math.inf:
            raise ConfigError(
                f"--train.memory-limit-gib {self.memory_limit_gib} must be above 0; None takes what there is"
            )
        if self.free_steps < 0:
            raise ConfigError(f"--train.free-steps {self.free_steps} is negative; 0 times every step")
        if self.stop_after is not None and self.stop_after < 1:
            raise ConfigError(f"--train.stop-after {self.stop_after} must be at least 1; None runs to the end")


@dataclass(frozen=True, kw_only=True)
class GuardConfig:
    """What is done about bad numbers. A run without any has the same bits with and without it."""

    skip: bool = True
    """Skip a step whose loss or gradient is not finite: weights and optimizer stay as they are, schedule and data go
    on."""
    spike: float | None = None
    """Skip also a step whose loss lies more than so many standard deviations above the mean of the last 100 or so;
    None: never. 6 is a careful value."""
    limit: int = 10
    """So many skipped steps in a row end the run, with a diagnosis."""

    def __post_init__(self) -> None:
        if self.spike is not None and not 0 < self.spike < math.inf:
            raise ConfigError(f"--guard.spike {self.spike} must be above 0; None judges no loss by those before it")
        if self.spike is not None and not self.skip:
            raise ConfigError(f"--guard.spike {self.spike} needs --guard.skip, or a spike would only be looked at")
        if self.limit < 1:
            raise ConfigError(f"--guard.limit {self.limit} must be at least 1; 1 stops at the first skipped step")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    preset: Hidden[str]
    """Name of the preset this came from."""
    track: str | None = None
    """Name of the track whose rules the run follows, if any."""
    steps: int
    """Optimizer steps. On the command line, --steps scales the schedule with it."""
    seed: int = 0
    """Seed of the initial weights and of a shuffled order."""
    model: ModelConfig = field(default_factory=ModelConfig)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    head: HeadConfig = field(default_factory=HeadConfig)
    mlp: MlpConfig = field(default_factory=MlpConfig)
    data: DataConfig = field(default_factory=DataConfig)
    batch: BatchConfig
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ConfigError(f"--steps {self.steps} must be at least 1")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"--seed {self.seed} is outside [0, 2^63)")
        self._check_lengths()
        self._check_split()
        self._check_instruments()
        if self.data.end_of_text >= self.model.vocab_size:
            raise ConfigError(
                f"--data.end-of-text {self.data.end_of_text} is not below --model.vocab-size {self.model.vocab_size}"
            )

    def _check_instruments(self) -> None:
        if self.metrics.instruments and (flag := self.parallel.talks_inside):
            raise ConfigError(
                f"--metrics.instruments looks at whole gradients of whole sequences, which {flag} leaves on no rank; "
                f"use one of the two"
            )

    def _check_split(self) -> None:
        parts, length, unit = self.parallel.split_sequence, self.batch.sequence_tokens, self.model.window.unit
        if parts == 1:
            return
        if unit == "none":
            raise ConfigError(
                f"--parallel.split-sequence {parts}: --model.window.unit none lets every token see all before it, so "
                f"each rank would need the whole sequence; use a preset with a window (r13-window-warmup and later)"
            )
        if length % (parts * BLOCK_TOKENS):
            fit = max(1, round(length / (parts * BLOCK_TOKENS))) * parts * BLOCK_TOKENS
            raise ConfigError(
                f"--parallel.split-sequence {parts} does not cut --batch.sequence-tokens {length:,} into whole blocks "
                f"of {BLOCK_TOKENS}; use sequences of {fit:,}, or another number of ranks"
            )

    def _check_lengths(self) -> None:
        length = self.batch.sequence_tokens
        if length > self.model.rotary.max_tokens:
            raise ConfigError(
                f"--batch.sequence-tokens {length:,} exceeds --model.rotary.max-tokens "
                f"{self.model.rotary.max_tokens:,}; raise the latter"
            )
        if self.model.window.unit in ("blocks", "tokens_in_blocks") and length % BLOCK_TOKENS:
            fit = max(1, length // BLOCK_TOKENS) * BLOCK_TOKENS
            raise ConfigError(
                f"--batch.sequence-tokens {length:,} is not a multiple of {BLOCK_TOKENS}, the block of "
                f"--model.window.unit {self.model.window.unit}; use {fit:,}"
            )
