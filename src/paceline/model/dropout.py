"""Dropout without a generator: a number is dropped or kept by a hash of seed and step, the token's place in the global
batch, the place in the model, and the channel.

So a resumed run has the bits of an uninterrupted one, a recomputed block drops what it dropped before, and micro-
batches and ranks change no mask. Passes without gradients drop nothing. Attention's weights are not dropped, since its
fast back ends never hold them. Uncompiled, the hash costs seven passes over int64 numbers of the stream's size.
"""

import hashlib

import torch
from torch import Tensor, nn

BITS = (1 << 32) - 1
FACTOR = 0x45D9F3B
"""Below 2^31: its product with 32 bits stays inside int64."""


def step_key(seed: int, step: int) -> int:
    """What a step's masks begin with."""
    return int.from_bytes(hashlib.blake2b(f"dropout:{seed}:{step}".encode(), digest_size=4).digest(), "little")


def mixed(x: Tensor) -> Tensor:
    """A permutation of the 32-bit numbers, int64, that spreads neighbours."""
    for _ in range(2):
        x = ((x >> 16) ^ x) * FACTOR & BITS
    return (x >> 16) ^ x


class Dropout(nn.Module):
    """Of two places in the model: a number becomes 0, or is scaled by 1/(1 - rate)."""

    def __init__(self, rate: float, *, place: int) -> None:
        super().__init__()
        self.rate, self.place = rate, place

    def forward(self, x: Tensor, keys: Tensor, *, second: bool = False) -> Tensor:
        """x (B, T, D) by the keys of its tokens (B, T)."""
        channels = torch.arange(x.size(-1), device=x.device) * 65_537 + 2 * self.place + second
        drawn = mixed(keys[..., None] ^ mixed(channels & BITS))
        return torch.where(drawn < int(self.rate * (BITS + 1)), 0.0, x / (1.0 - self.rate)).to(x.dtype)


class DropoutKeys(nn.Module):
    """The keys of a pass, from what training writes into the two buffers."""

    step_key: Tensor
    first_sequence: Tensor

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.drop = Dropout(rate, place=0)
        self.register_buffer("step_key", torch.zeros((), dtype=torch.int64), persistent=False)
        self.register_buffer("first_sequence", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, tokens: Tensor, positions: Tensor | slice) -> Tensor:
        """(B, T) int64 in [0, 2^32)."""
        sequences = self.first_sequence + torch.arange(tokens.size(0), device=tokens.device)
        if isinstance(positions, slice):
            positions = torch.arange(positions.start, positions.stop, device=tokens.device)
        return mixed(mixed(mixed(sequences & BITS) ^ self.step_key)[:, None] ^ mixed(positions & BITS))
