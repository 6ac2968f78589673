"""The ways to cut a step, from the fastest to the one that takes least memory. None changes what it computes. No torch.

By their cost in time: fewer sequences at once, down to one; logits by chunks (one more product with the lm_head);
recomputed blocks (one more forward pass); shorter chunks. The largest micro-batch is `BatchConfig.micro_sequences`;
where our own kernels run it is four times that, which saves 2 % of a step on an H200.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.backends.lm_head import in_chunks
from paceline.backends.registry import Chosen, find
from paceline.parallel.batch_split import rank_batch
from paceline.parallel.memory_model import KEEPING, Execution, Memory, step_memory
from paceline.settings.data import BatchConfig
from paceline.settings.run import RunConfig
from paceline.settings.schedule import largest_batch

USABLE_SHARE = 0.92  # of the available memory: the rest goes into holes and to what the model of memory leaves out
LARGE_MICRO_TOKENS = 262_144  # of one micro-batch where our own kernels run


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    micro_tokens: int
    recompute: bool
    lm_head: str  # back end of the output layer
    lm_head_chunk_tokens: int | None

    def __str__(self) -> str:
        parts = [f"micro-batches of {self.micro_tokens:,} tokens"]
        parts += ["recomputed blocks"] * self.recompute
        if self.lm_head_chunk_tokens is not None:
            parts.append(f"a {self.lm_head} lm_head in chunks of {self.lm_head_chunk_tokens:,} tokens")
        return ", ".join(parts)

    def below(self, other: "MemoryPlan") -> bool:
        """Saves more memory on some axis and less on none."""
        shorter = (self.lm_head_chunk_tokens or math.inf) < (other.lm_head_chunk_tokens or math.inf)
        more = self.micro_tokens < other.micro_tokens or self.recompute > other.recompute
        less = self.micro_tokens > other.micro_tokens or self.recompute < other.recompute
        return not less and (more or self.lm_head != other.lm_head or shorter)

    def flags(self, other: "MemoryPlan") -> str:
        """What to write on the command line to get from the other to this."""
        chunk = self.lm_head_chunk_tokens
        flags = [f"--batch.micro-tokens {self.micro_tokens}"] * (self.micro_tokens != other.micro_tokens)
        flags += ["--train.recompute"] * (self.recompute > other.recompute)
        flags += [f"--lm-head.backend {self.lm_head}"] * (self.lm_head != other.lm_head)
        flags += [f"--lm-head.chunk-tokens {chunk}"] * (chunk != other.lm_head_chunk_tokens)
        return " ".join(flags)


@dataclass(frozen=True, kw_only=True)
class Planned:
    config: RunConfig
    backends: Chosen
    world: int

    @property
    def batch(self) -> BatchConfig:
        """The largest of the run."""
        return largest_batch(self.config)

    @property
    def share(self) -> BatchConfig:
        """Of the batch, what one rank computes."""
        return rank_batch(self.batch, self.world, self.config.parallel.context_parallel)

    def memory(self, plan: MemoryPlan) -> Memory:
        """Predicted for a step by this plan, of one rank."""
        config = self.config
        chosen = {operation: getattr(self.backends, operation).name for operation in KEEPING}
        how = Execution.of(config, self.world, {**chosen, "lm_head": plan.lm_head})
        how = replace(how, lm_head_chunk_tokens=plan.lm_head_chunk_tokens, recompute=plan.recompute)
        share = replace(self.share, micro_tokens=plan.micro_tokens // config.parallel.context_parallel)
        return step_memory(config.model, config.optim, share, how)


def memory_plans(of: Planned) -> list[MemoryPlan]:
    """All, the fastest first. A micro-batch or a back end that the config states is the same in all of them."""
    share, length = of.share, of.batch.sequence_tokens
    top = lowest = share.micro_sequences
    if of.batch.micro_tokens is None:
        large = LARGE_MICRO_TOKENS // length if find("lm_head", of.backends.lm_head.name).custom else 0
        top, lowest = max(top, min(large, share.sequences)), 1
    plans = [
        MemoryPlan(
            micro_tokens=n * length,
            recompute=of.config.train.recompute,
            lm_head=of.backends.lm_head.name,
            lm_head_chunk_tokens=of.config.lm_head.chunk_tokens,
        )
        for n in range(top, lowest - 1, -1)
        if share.sequences % n == 0
    ]
    for change in (_with_chunks, lambda at, _: replace(at, recompute=True), _with_short_chunks):
        lower = change(plans[-1], of)
        if lower != plans[-1] and of.memory(lower).peak <= of.memory(plans[-1]).peak:  # short chunks may take more
            plans.append(lower)
    return plans


def _with_chunks(at: MemoryPlan, of: Planned) -> MemoryPlan:
    """Logits by chunks, unless the user names the output layer that holds all of them."""
    if find("lm_head", at.lm_head).short_chunk_tokens is not None or of.config.lm_head.backend != "auto":
        return at
    return replace(at, lm_head=in_chunks().name, lm_head_chunk_tokens=in_chunks().short_chunk_tokens)


def _with_short_chunks(at: MemoryPlan, _: Planned) -> MemoryPlan:
    """Of our own kernel, whose chunks are long."""
    head = find("lm_head", at.lm_head)
    if not head.custom or at.lm_head_chunk_tokens is not None or at.micro_tokens <= (head.short_chunk_tokens or 0):
        return at
    return replace(at, lm_head_chunk_tokens=head.short_chunk_tokens)


def first_that_fits(peaks: Sequence[int], available: int | None) -> int | None:
    """Which of the plans with these peaks is taken; None if even the last is too large."""
    if available is None:
        return 0
    return next((number for number, peak in enumerate(peaks) if peak <= USABLE_SHARE * available), None)
