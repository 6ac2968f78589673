"""What one of several ranks does of a step. No torch.

A rank takes a contiguous run of the batch's sequences (`data/batches.share_of`), as many as every other, so that the
step is the same for any number of ranks and no one waits for a larger share.
"""

from dataclasses import replace

from paceline.core.errors import ConfigError
from paceline.data.config import BatchConfig


def share_of_batch(batch: BatchConfig, world: int) -> BatchConfig:
    """The part of a step that each of `world` ranks computes: its tokens, cut into micro-batches of the asked size, or
    into one where the share is smaller than that. Ranks that cannot share equally are refused."""
    if world == 1:
        return batch
    _check_divisible(batch, world)
    tokens = batch.tokens // world
    if batch.micro_tokens is None:
        return replace(batch, tokens=tokens)
    micro = min(batch.micro_tokens, tokens)
    if tokens % micro:
        fit = next(n for n in range(micro, 0, -batch.sequence_tokens) if tokens % n == 0)
        raise ConfigError(
            f"--batch.micro-tokens {micro:,} does not divide {tokens:,}, the tokens of a step on each of {world} "
            f"ranks; use {fit:,}"
        )
    return replace(batch, tokens=tokens, micro_tokens=micro)


def _check_divisible(batch: BatchConfig, world: int) -> None:
    if batch.sequences % world == 0:
        return
    unit = world * batch.sequence_tokens
    below = batch.tokens // unit * unit
    fits = f"{below:,} or {below + unit:,}" if below else f"{unit:,}"
    raise ConfigError(
        f"--batch.tokens {batch.tokens:,}: {batch.sequences} sequences of {batch.sequence_tokens:,} tokens cannot be "
        f"shared equally by {world} ranks; use {fits}, or another --nproc-per-node"
    )
