"""What a token takes from the tokens just before it: smeared embeddings, n-gram rows, offset keys.

`before` (B, 2) holds the two tokens before a pass, -1 where there is none; decoding with a cache gives them. Documents
are not separated. Hashes are those of the public records: products in int32 that wrap, xor, remainder.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.model.attention import Attend, attention_of
from paceline.model.ops import torch_dtype
from paceline.settings.model import SMEAR_INPUTS, LayerConfig, ModelConfig

ROW_HASH = {2: (36_313, 27_191), 3: (17_351, 60_961, 45_259)}
SIGN_HASH = {2: (48_271, 30_011), 3: (58_699, 39_779, 26_801)}
"""Multipliers of a token, the one before it and so on, by the length of the n-gram."""
SIGN_SEED = 20_240_520


def with_before(tokens: Tensor, before: Tensor | None, count: int) -> list[Tensor]:
    """The tokens (B, T), those one place before them and so on, `count` in all, as int32; -1: there is none."""
    if before is None:
        before = tokens.new_full((tokens.size(0), 2), -1)
    joined = torch.cat([before, tokens], dim=1).to(torch.int32)
    length = tokens.size(1)
    return [joined[:, 2 - back : 2 - back + length] for back in range(count)]


def hashed(grams: list[Tensor], multipliers: tuple[int, ...]) -> Tensor:
    total = grams[0] * multipliers[0]
    for gram, by in zip(grams[1:], multipliers[1:], strict=True):
        total = total ^ (gram * by)
    return total


def ngram_rows(tokens: Tensor, before: Tensor | None, n: int, rows: int) -> Tensor:
    """(B, T) int64: the row of each n-gram; the last row without n - 1 tokens before."""
    grams = with_before(tokens, before, n)
    return torch.where(grams[-1] >= 0, hashed(grams, ROW_HASH[n]) % (rows - 1), rows - 1).long()


def sign_rows(tokens: Tensor, before: Tensor | None, n: int, rows: int) -> Tensor:
    """(B, T) int64: the row of signs of each n-gram; the first without n - 1 tokens before."""
    grams = with_before(tokens, before, n)
    return torch.where(grams[-1] >= 0, hashed(grams, SIGN_HASH[n]) & (rows - 1), 0).long()


def drawn_signs(config: ModelConfig) -> Tensor:
    """(sign rows, width) of ±1, the same for every model of these sizes."""
    generator = torch.Generator().manual_seed(SIGN_SEED)
    drawn = torch.randint(2, (config.ngrams.sign_rows, config.width), generator=generator) * 2 - 1
    return drawn.to(torch_dtype(config.precision.compute))


class Ngrams(nn.Module):
    """The rows of all n-gram tables with their signs, added up. `rows_of` looks up: (ids, n) -> rows."""

    signs: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config, self.tables = config.ngrams, config.ngrams.tables
        self.register_buffer("signs", drawn_signs(config), persistent=False)

    def forward(self, tokens: Tensor, before: Tensor | None, rows_of: Callable[[Tensor, int], Tensor]) -> Tensor:
        """(B, T, width)."""
        found = [
            rows_of(ngram_rows(tokens, before, n, rows), n)
            * self.signs[sign_rows(tokens, before, n, self.config.sign_rows)]
            for n, rows in self.tables.items()
        ]
        return torch.stack(found).sum(0) if len(found) > 1 else found[0]


def smeared(x: Tensor, x_before: Tensor, gate: Tensor, factor: Tensor) -> Tensor:
    """x_t + λ σ(w·x_t) x_{t-1} for embeddings x (B, T, width), of which the gate w reads the first numbers; `x_before`
    (B, 1, width) stands before the first."""
    shifted = torch.cat([x_before, x[:, :-1]], dim=1)
    open_by = torch.sigmoid(x[..., :SMEAR_INPUTS].float() @ gate.T)
    return x + (factor * open_by).to(x.dtype) * shifted


def offset_keys(k: Tensor, pairs: int, k_before: Tensor | None = None) -> Tensor:
    """Keys (B, T, H, D) whose dimensions that no pair turns are those of the token before. `k_before` (B, 1, H, D): the
    key before the first; without one the first keeps its own."""
    half = k.size(-1) // 2
    at_rest = (torch.arange(k.size(-1), device=k.device) % half) >= pairs
    shifted = torch.cat([k[:, :1] if k_before is None else k_before, k[:, :-1]], dim=1)
    return torch.where(at_rest, shifted, k)


@dataclass(frozen=True, eq=False)  # by identity: the compiler hashes it
class OffsetKeys:
    """An `Attend` that gives another one offset keys in the layers that have them."""

    config: ModelConfig
    attend: Attend

    def __call__(self, layer: LayerConfig, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        shape = attention_of(layer)
        k = offset_keys(k, self.config.rotary.pairs(shape.qk_dim)) if shape.key_offset else k
        return self.attend(layer, q, k, v)
