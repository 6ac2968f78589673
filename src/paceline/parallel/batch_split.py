"""What one of several ranks does of a step. No torch.

Each takes a contiguous run of the batch's sequences (`data/batches.share_of`), all equally many: the step is the same
for any number of ranks. Under `parallel.context_parallel`, neighbours take slices of the same run's sequences.
"""

from typing import NamedTuple

from paceline.core.errors import ConfigError
from paceline.data.corpus import Batch
from paceline.settings.data import BatchConfig


class RankSlice(NamedTuple):
    """Which sequences of a batch a rank takes, run `run` of `runs`, and which slice of each, `part` of `parts`."""

    run: int
    runs: int
    part: int
    parts: int

    def cut(self, batch: Batch) -> Batch:
        """The slices of these sequences that are this rank's."""
        if self.parts == 1:
            return batch
        length = batch.tokens.shape[1] // self.parts
        columns = slice(self.part * length, (self.part + 1) * length)
        return Batch(batch.tokens[:, columns], batch.targets[:, columns])


def rank_slice(rank: int, world: int, parts: int) -> RankSlice:
    """Ranks of one sequence are neighbours, hence mostly on one machine."""
    return RankSlice(rank // parts, world // parts, rank % parts, parts)


def rank_batch(batch: BatchConfig, world: int, parts: int = 1) -> BatchConfig:
    """The part of a step that each of `world` ranks computes, `parts` of them at a sequence, in micro-batches of the
    asked size or of the whole share, if that is smaller. Ranks that cannot share equally are refused."""
    if world % parts:
        cure = f"start a multiple of {parts} with torchrun --nproc-per-node"
        raise ConfigError(f"--parallel.context-parallel {parts} does not divide the number of ranks, {world}; {cure}")
    if world == 1:
        return batch
    if batch.sequences % (runs := world // parts):
        unit = runs * batch.sequence_tokens
        below = batch.tokens // unit * unit
        fits = f"{below:,} or {below + unit:,}" if below else f"{unit:,}"
        has = f"{batch.sequences} sequences of {batch.sequence_tokens:,} tokens cannot be shared equally"
        cure = f"use {fits}, or another --nproc-per-node"
        raise ConfigError(f"--batch.tokens {batch.tokens:,}: {has} by {runs} ranks; {cure}")
    tokens, micro = batch.tokens * parts // world, batch.micro_tokens
    if micro is not None:
        micro = min(micro, tokens)
        if tokens % micro:
            fit = next(n for n in range(micro, 0, -batch.sequence_tokens) if tokens % n == 0)
            of = f"{tokens:,}, the tokens of a step on each of {world} ranks"
            raise ConfigError(f"--batch.micro-tokens {micro:,} does not divide {of}; use {fit:,}")
        micro //= parts
    return BatchConfig(tokens=tokens // parts, sequence_tokens=batch.sequence_tokens // parts, micro_tokens=micro)
