"""The whole of a run as one value. No torch.

How the loop runs, what it does about bad steps, when it validates and saves, what it records; and `RunConfig`, which
composes all settings. What concerns two of its parts at once is checked here, before any device is touched.
"""

import os
import sys
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, Literal

from paceline.core.command_line import Hidden
from paceline.core.errors import ConfigError
from paceline.core.migrations import migrate_config
from paceline.core.schema import from_dict
from paceline.core.units import BLOCK_TOKENS
from paceline.settings.backends import AttentionConfig, LmHeadConfig, MatmulConfig, MlpConfig, QkvConfig
from paceline.settings.data import BatchConfig, DataConfig
from paceline.settings.groups import modules_in, own_rules, param_groups
from paceline.settings.limits import POSITIVE_FINITE, Limit, Limited, at_least, inside
from paceline.settings.model import ACTIVATIONS, ModelConfig
from paceline.settings.optim import OptimConfig
from paceline.settings.parallel import ParallelConfig
from paceline.settings.plugins import PluginRef, check_name, not_loaded
from paceline.settings.schedule import RATE_SHAPES, Stage, check_stages
from paceline.settings.spec import describe

MOST_THREADS = 1024
"""Of one process. Systems refuse to make many more, and a few thousand end it without a word."""
MAY_CHANGE_ON_RESUME = (
    *("train.", "bad_steps.", "checkpoint.", "metrics.", "parallel."),
    *("data.dir", "batch.micro_tokens", "lm_head."),
)
"""What a resumed run may do otherwise than before; everything else is part of what it computes."""
MOST_STEPS = 10_000_000
"""The data of every step are worked out before the first: a few seconds for so many."""
PROJECT = Limit("is no project's name; give one, or None for none", lambda name: bool(name.strip()))


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Limited, prefix="--train."):
    """How the loop runs."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`cuda` refuses a machine without it; the full-size records ask for it."""
    compile: bool = False
    """Compile the model and the optimizer with torch.compile. Pays on a GPU; on a CPU only for long runs."""
    untimed_steps: Annotated[int, at_least(0).saying("0 times every step")] = 10
    """Steps before the train clock starts (the records' rule: compilation and warm-up are not counted there; the wall
    clock counts everything)."""
    deterministic: bool = False
    """Only operations that give the same bits every time, so that a resumed run is the uninterrupted one. A CPU run
    always is. On a GPU: embedding gradients by sorted sums, cuBLAS and PyTorch in their repeatable modes, and no kernel
    chosen by timing it (--train.coordinate-descent is left out)."""
    custom_kernels: bool = True
    """Let `auto` choose kernels of our own where they work; off, every back end left to `auto` is PyTorch's, compiled
    or not. The same mathematics either way."""
    cuda_graph: bool = True
    """On one GPU and compiled, replay a micro-batch as one CUDA graph instead of launching its kernels one by one. The
    same kernels either way."""
    recompute: bool = False
    """Recompute each block in the backward pass instead of keeping its activations: less memory, same numbers."""
    memory_limit_gib: Annotated[float | None, POSITIVE_FINITE.saying("None takes what there is")] = None
    """Memory that a rank may take; None: what its GPU has free, 80 % of what a CPU has free. A GPU is held to it; on a
    CPU steps are cut so that they are predicted to keep it."""
    coordinate_descent: bool = False
    """Let the compiler tune its kernels by coordinate descent: slower to start, sometimes faster to run."""
    skip_guards: bool = False
    """After five steps, stop checking whether compiled code still fits its inputs; they never change shape here."""
    expandable_segments: bool = False
    """Let the CUDA allocator grow its segments, which leaves fewer holes."""
    threads: Annotated[int | None, inside(1, MOST_THREADS).saying("None takes all cores")] = None
    """CPU threads; None: all cores. The last bits of a CPU run depend on it."""
    stop_after: Annotated[int | None, at_least(1).saying("None runs to the end")] = None
    """End this launch well after so many steps and leave the schedule alone; --resume goes on with as many again, or to
    the end with --train.stop-after None."""


@dataclass(frozen=True, kw_only=True)
class BadStepsConfig(Limited, prefix="--bad-steps."):
    """What is done about bad numbers. A run without any has the same bits with and without it."""

    skip: bool = True
    """Skip a step whose loss or gradient is not finite: weights and optimizer stay as they are, schedule and data go
    on."""
    spike: Annotated[float | None, POSITIVE_FINITE.saying("None judges no loss by earlier ones")] = None
    """Skip also a step whose loss lies more than so many standard deviations above the mean of the last 100 or so;
    None: never. 6 is a careful value."""
    limit: Annotated[int, at_least(1).saying("1 stops at the first skipped step")] = 10
    """So many skipped steps in a row end the run, with a diagnosis."""

    def check(self) -> None:
        if self.spike is not None and not self.skip:
            raise ConfigError(f"--bad-steps.spike {self.spike} needs --bad-steps.skip; a spike is skipped or ignored")


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(Limited, prefix="--evaluate."):
    every: Annotated[int | None, at_least(1).saying("None validates only at the end")] = 125
    """Steps between two validations, the first before step 0; None: only at the end. One always follows the last
    step."""
    tokens: Annotated[int, at_least(0).saying("0 means all of the validation data")] = 10_485_760
    """Tokens from the start of the validation data, rounded down to whole sequences; 0: all of them."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Limited, prefix="--checkpoint."):
    every: Annotated[int | None, at_least(1).saying("None saves only at the end")] = None
    """Steps between two checkpoints; None: only at the end. They are written beside the training."""
    keep: Annotated[int, at_least(2).saying("one may be damaged")] = 2
    """How many of the newest are kept; two at least, since one may turn out to be damaged."""
    at_end: bool = True
    """Save after the last step. Off, a run that comes to its end leaves metrics and card only."""


@dataclass(frozen=True, kw_only=True)
class MetricsConfig(Limited, prefix="--metrics."):
    every: Annotated[int, at_least(1)] = 1
    """Steps between two records of the training loss. Values stay on the device until a record is due."""
    diagnostics: bool = False
    """Also record gradient norm, update-to-weight ratio per class, largest logit and query-key product, and reserved
    memory. Nothing is computed for them when off."""
    tensorboard: bool = False
    """Also write TensorBoard's event files, into the run's folder (needs `paceline[tb]`). With it or another tracker
    the gradient norm of every step is recorded, too."""
    wandb: Annotated[str | None, PROJECT] = None
    """Also log to this project of Weights & Biases (needs `paceline[wandb]`)."""
    trackio: Annotated[str | None, PROJECT] = None
    """Also log to this project of trackio (needs `paceline[trackio]`)."""

    @property
    def tracked(self) -> bool:
        """Whether anything but the run's own files takes metrics."""
        return self.tensorboard or self.wandb is not None or self.trackio is not None


@dataclass(frozen=True, kw_only=True)
class RunConfig(Limited, prefix="--"):
    preset: Hidden[str]
    """Name of the preset this came from."""
    track: str | None = None
    """Name of the track whose rules the run follows, if any."""
    steps: Annotated[int, at_least(1, MOST_STEPS)]
    """Optimizer steps. On the command line, --steps scales the schedule with it."""
    seed: Annotated[int, Limit("is outside [0, 2^63)", lambda seed: 0 <= seed < 2**63)] = 0
    """Seed of the initial weights and of a shuffled order."""
    model: ModelConfig = field(default_factory=ModelConfig)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    qkv: QkvConfig = field(default_factory=QkvConfig)
    lm_head: LmHeadConfig = field(default_factory=LmHeadConfig)
    mlp: MlpConfig = field(default_factory=MlpConfig)
    matmul: MatmulConfig = field(default_factory=MatmulConfig)
    data: DataConfig = field(default_factory=DataConfig)
    batch: BatchConfig
    optim: OptimConfig = field(default_factory=OptimConfig)
    stages: Hidden[tuple[Stage, ...]] = ()
    """Parts of the run with settings of their own; none: one for all steps. Set by a preset or a config file."""
    train: TrainConfig = field(default_factory=TrainConfig)
    bad_steps: BadStepsConfig = field(default_factory=BadStepsConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    plugins: Hidden[tuple[PluginRef, ...]] = ()
    """Files of the user's own that it was given (`--plugin`), by name and hash."""

    def check(self) -> None:
        self._check_lengths()
        self._check_split()
        if self.metrics.diagnostics and (flag := self.parallel.collective_forward):
            raise ConfigError(f"--metrics.diagnostics needs whole gradients, which {flag} leaves on no rank")
        if self.parallel.fsdp and self.optim.muon.row_beta2 is not None:
            raise ConfigError("--optim.muon.row-beta2 needs whole matrices, which --parallel.fsdp leaves on no rank")
        check_stages(self)
        if not not_loaded(self.plugins):  # else it is only read, and whoever trains or predicts with it asks for them
            self._check_names()
            param_groups(self.optim, describe(self.model).groups)
        if (end := self.data.end_of_text) >= self.model.vocab_size:
            size = self.model.vocab_size
            raise ConfigError(f"--data.end-of-text {end} is not below --model.vocab-size {size}; use {end + 1} or more")

    def _check_names(self) -> None:
        own, theirs = (*own_rules(), "adamw"), self.plugins
        check_name("activations", self.model.activation, ACTIVATIONS, theirs, "--model.activation")
        check_name("rate_shapes", self.optim.schedule.shape, RATE_SHAPES, theirs, "--optim.schedule.shape")
        check_name("rules", self.optim.matrices, own, theirs, "--optim.matrices")
        for rule in (group.rule for group in self.optim.groups if group.rule is not None):
            check_name("rules", rule, own[:-1], theirs, "optim.groups: rule")
        for term in self.model.loss_terms:
            check_name("loss_terms", term.name, own_loss_terms(), theirs, "model.loss_terms:")
        if len({term.name for term in self.model.loss_terms}) < len(self.model.loss_terms):
            raise ConfigError("model.loss_terms: a term is named twice; say its weight in one entry")

    def _check_split(self) -> None:
        parts, length, unit = self.parallel.context_parallel, self.batch.sequence_tokens, self.model.window.unit
        if parts > 1 and self.model.looks_at_previous:
            why = "the smear, n-gram tables and key offsets need the token before a slice"
            raise ConfigError(f"--parallel.context-parallel {parts}: {why}; use a preset without them")
        if parts > 1 and self.model.candidates is not None:
            why = "--model.candidates are those of a whole sequence, of which a rank has a slice"
            raise ConfigError(f"--parallel.context-parallel {parts}: {why}; use --model.candidates None")
        if parts > 1 and unit == "none":
            why = "--model.window.unit none lets every token see all before it"
            raise ConfigError(f"--parallel.context-parallel {parts}: {why}; use a preset with a window")
        if parts > 1 and length % (parts * BLOCK_TOKENS):
            fit = max(1, round(length / (parts * BLOCK_TOKENS))) * parts * BLOCK_TOKENS
            cut = f"does not cut --batch.sequence-tokens {length:,} into whole blocks of {BLOCK_TOKENS}"
            raise ConfigError(f"--parallel.context-parallel {parts} {cut}; use sequences of {fit:,}, or other ranks")

    def _check_lengths(self) -> None:
        length, most = self.batch.sequence_tokens, self.model.rotary.max_tokens
        if length > most:
            raise ConfigError(f"--batch.sequence-tokens {length:,} exceeds --model.rotary.max-tokens {most:,}")
        if self.model.window.unit in ("blocks", "tokens_in_blocks") and length % BLOCK_TOKENS:
            fit = max(1, length // BLOCK_TOKENS) * BLOCK_TOKENS
            block = f"a multiple of {BLOCK_TOKENS}, the block of --model.window.unit {self.model.window.unit}"
            raise ConfigError(f"--batch.sequence-tokens {length:,} is not {block}; use {fit:,}")


@cache
def own_loss_terms() -> list[str]:
    return list(modules_in("paceline.model.loss_terms"))


def read_config(values: Any, *, at: str = "") -> RunConfig:
    """A run's config as a file has it, written by this version or an older one."""
    return from_dict(RunConfig, migrate_config(values, say_once), at=at)


@cache
def say_once(line: str) -> None:
    """On rank 0 alone. A launch reads the config and its copies in the checkpoints."""
    if os.environ.get("RANK", "0") == "0":
        print(f"paceline: {line}", file=sys.stderr)
