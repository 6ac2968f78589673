"""The ways to cut a step, from the fastest to the one that takes least memory. None changes what it computes.

The ladder goes down by what a rung costs in time: fewer sequences at once, down to one; logits by chunks where all of
them would exist (one more product with the head); blocks computed again in the backward pass (one more forward pass of
them); shorter chunks of logits. A sequence is never shortened. The top is `BatchConfig.micro_sequences`; where our own
kernels run it is four times that, which saves 2 % of a step on an H200.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from paceline.parallel.memory_model import Execution, Memory, halo_tokens, step_memory
from paceline.parallel.share import share_of_batch
from paceline.train.back_ends import BackEnds
from paceline.train.config import RunConfig

USABLE_SHARE = 0.92
"""Of the memory there is: the rest is lost in the allocator's holes and to what the model of memory leaves out."""
LARGE_MICRO_TOKENS = 262_144
"""Of one micro-batch where our own kernels run."""
SHORT_CHUNKS = {"chunked": 1_024, "fused": 2_048}
"""Tokens of a chunk of logits where memory is short: 0.7 and 0.2 GiB at 50,304 rows."""


@dataclass(frozen=True, kw_only=True)
class Rung:
    """One way to cut a step."""

    micro_tokens: int
    recompute: bool
    head: str
    """Back end of the head."""
    head_chunk_tokens: int | None

    def __str__(self) -> str:
        parts = [f"micro-batches of {self.micro_tokens:,} tokens"]
        parts += ["recomputed blocks"] * self.recompute
        if self.head_chunk_tokens is not None:
            parts.append(f"a {self.head} head in chunks of {self.head_chunk_tokens:,} tokens")
        return ", ".join(parts)

    def below(self, other: "Rung") -> bool:
        """Whether this takes more pains than the other in something, and fewer in nothing."""
        shorter = (self.head_chunk_tokens or math.inf) < (other.head_chunk_tokens or math.inf)
        more = self.micro_tokens < other.micro_tokens or self.recompute > other.recompute
        fewer = self.micro_tokens > other.micro_tokens or self.recompute < other.recompute
        return not fewer and (more or self.head != other.head or shorter)

    def flags(self, other: "Rung") -> str:
        """What to write on the command line to get from the other to this."""
        flags = [f"--batch.micro-tokens {self.micro_tokens}"] * (self.micro_tokens != other.micro_tokens)
        flags += ["--train.recompute"] * (self.recompute > other.recompute)
        flags += [f"--head.backend {self.head}"] * (self.head != other.head)
        flags += [f"--head.chunk-tokens {self.head_chunk_tokens}"] * (self.head_chunk_tokens != other.head_chunk_tokens)
        return " ".join(flags)


@dataclass(frozen=True, kw_only=True)
class Fit:
    """How a run's step is cut, and why."""

    rung: Rung
    why: str
    key: str | None
    """Under which the choice is remembered; None: the micro-batch was asked for, nothing was chosen."""

    def __str__(self) -> str:
        return f"{self.rung}: {self.why}"


def ladder(config: RunConfig, back_ends: BackEnds, world: int = 1) -> list[Rung]:
    """All rungs from the top. A micro-batch or a back end that the config states is the same on all of them."""
    share = share_of_batch(config.batch, world, config.parallel.split_sequence)
    top = lowest = share.micro_sequences
    if config.batch.micro_tokens is None:
        lowest = 1
        large = LARGE_MICRO_TOKENS // config.batch.sequence_tokens if back_ends.head.name == "fused" else 0
        top = max(top, min(large, share.sequences))
    sizes = [n for n in range(top, lowest - 1, -1) if share.sequences % n == 0]
    rungs = [
        Rung(
            micro_tokens=n * config.batch.sequence_tokens,
            recompute=config.train.recompute,
            head=back_ends.head.name,
            head_chunk_tokens=config.head.chunk_tokens,
        )
        for n in sizes
    ]
    for change in (_with_chunks(config), _recomputed, _with_short_chunks):
        lower = change(rungs[-1])
        peak, before = (foretold(config, back_ends, rung, world).peak for rung in (lower, rungs[-1]))
        if lower != rungs[-1] and peak <= before:  # chunks of short sequences may take more
            rungs.append(lower)
    return rungs


def _with_chunks(config: RunConfig) -> Callable[[Rung], Rung]:
    """Logits by chunks, unless the user names the head that holds all of them."""

    def change(at: Rung) -> Rung:
        if at.head != "reference" or config.head.backend == "reference":
            return at
        return replace(at, head="chunked", head_chunk_tokens=at.head_chunk_tokens or SHORT_CHUNKS["chunked"])

    return change


def _recomputed(at: Rung) -> Rung:
    return replace(at, recompute=True)


def _with_short_chunks(at: Rung) -> Rung:
    if at.head != "fused" or at.head_chunk_tokens is not None or at.micro_tokens <= SHORT_CHUNKS["fused"]:
        return at
    return replace(at, head_chunk_tokens=SHORT_CHUNKS["fused"])


def foretold(config: RunConfig, back_ends: BackEnds, rung: Rung, world: int = 1) -> Memory:
    """Memory of a step on this rung, of one rank."""
    how = Execution(
        attention=back_ends.attention.name,
        heads=back_ends.heads.name,
        mlp=back_ends.mlp.name,
        head=rung.head,
        head_chunk_tokens=rung.head_chunk_tokens,
        compiled=config.train.compile,
        recompute=rung.recompute,
        gradient_copies=2 if world > 1 and not config.parallel.bucket_views else 1,
        shards=world if config.parallel.fully_shard else 1,
        halo_tokens=halo_tokens(config.model, config.batch, config.parallel.split_sequence),
    )
    parts = config.parallel.split_sequence
    share = replace(share_of_batch(config.batch, world, parts), micro_tokens=rung.micro_tokens // parts)
    return step_memory(config.model, config.optim, share, how)


def first_that_fits(peaks: Sequence[int], there_is: int | None) -> int | None:
    """Which of the rungs with these peaks is taken; None if even the last is too large."""
    if there_is is None:
        return 0
    return next((number for number, peak in enumerate(peaks) if peak <= USABLE_SHARE * there_is), None)
