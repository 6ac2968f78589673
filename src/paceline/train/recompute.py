"""Blocks that keep only their inputs and are computed again in the backward pass (`train.recompute`).

Costs one more forward pass of the blocks, about a third of their arithmetic. Nothing in a block is random, so no state
of a generator is kept, and the second pass gives the same bits. Skips are added inside blocks: the compiler keeps what
one block hands to the next, but computes again what is only added to something in between, with the whole block.
"""

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline.model.attention import Attend, Turn
from paceline.model.block import Skip


def run_recomputed(
    block: nn.Module, x: Tensor, x0: Tensor, extra: Tensor | None, turn: Turn, attend: Attend, skip: Skip | None
) -> tuple[Tensor, Tensor | None]:
    """`run_plainly` with less memory: a `RunBlock`."""

    def run(x: Tensor, x0: Tensor, extra: Tensor | None, skip: "Skip | None") -> tuple[Tensor, Tensor | None]:
        found: tuple[Tensor, Tensor | None] = block(x, x0, extra, turn, attend, skip)
        return found

    found: tuple[Tensor, Tensor | None] = checkpoint(
        run, x, x0, extra, skip, use_reentrant=False, preserve_rng_state=False
    )
    return found
