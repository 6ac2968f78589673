"""Every lookup table: tokens, and the rows that the value path mixes into attention values."""

from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.kernels.row_gradients import RowGradients, look_up_rows
from paceline.model.ops import declare, torch_dtype
from paceline.settings import spec
from paceline.settings.model import AttentionLayer, ModelConfig

LookUp = Callable[[Tensor, Tensor], Tensor]
"""(tokens, table) -> rows, as `F.embedding`."""


class Embeddings(nn.Module):
    token: nn.Parameter
    position: nn.Parameter
    value_chunks: nn.Parameter
    values: nn.ParameterDict
    ngrams: nn.ParameterDict
    smear: nn.Parameter
    smear_gate: nn.Parameter

    def __init__(self, config: ModelConfig, look_up: LookUp = F.embedding) -> None:
        super().__init__()
        self.config, self.look_up = config, look_up
        self.row_gradients = nn.ModuleDict()
        """By the name of the table, dots written as underscores: tables whose gradient is kept as rows."""
        declare(self, spec.embeddings(config))
        if config.ngrams.tables:
            from paceline.model.previous import Ngrams

            self.ngram_sum = Ngrams(config)

    def forward(self, tokens: Tensor, positions: Tensor | slice, before: Tensor | None = None) -> Tensor:
        """(B, T) -> (B, T, width) in the format of the residual stream; `positions` says where the tokens stand, and
        `before` (B, 2) what came before them, -1: nothing."""
        rows = self._placed(tokens, positions)
        if self.config.smear:
            from paceline.model.previous import smeared

            last = rows.new_zeros(len(rows), 1, rows.size(-1))
            if before is not None and not isinstance(positions, slice):
                token, place = before[:, 1:], positions[:, :1] - 1
                last = torch.where(token[..., None] >= 0, self._placed(token.clamp(min=0), place.clamp(min=0)), last)
            rows = smeared(rows, last, self.smear_gate, self.smear)
        return rows

    def _placed(self, tokens: Tensor, positions: Tensor | slice) -> Tensor:
        """Token rows, with those of their positions where such are learned."""
        rows = self._rows(tokens, "token", self.token)
        if self.config.positions == "learned":
            rows = rows + self.position[positions]
        return rows.to(self._stream_dtype)

    def ngrams_of(self, tokens: Tensor, before: Tensor | None) -> Tensor:
        """(B, T, width): the signed rows of all n-gram tables, added up."""
        found: Tensor = self.ngram_sum(
            tokens, before, lambda ids, n: self._rows(ids, f"ngrams.{n}", self.ngrams[str(n)])
        )
        return found.to(self._stream_dtype)

    @property
    def _stream_dtype(self) -> torch.dtype:
        c = self.config.precision
        return torch_dtype("fp32" if c.mode == "autocast" else c.compute)

    def value_rows(self, tokens: Tensor, shape: AttentionLayer) -> Tensor:
        """(B, T) -> (B, T, H_kv, D): rows of a layer's value table, looked up when its first layer asks."""
        c, table = self.config, shape.value_table
        if c.value_storage == "chunks":
            before = sum(width for other, width in c.value_table_widths.items() if other < (table or 0))
            rows = self.look_up(tokens, self.value_chunks[:, before : before + shape.v_width])
        else:
            rows = self._rows(tokens, f"values_{table}", self.values[str(table)])
        return rows.to(torch_dtype(c.precision.compute)).view(*tokens.shape, shape.kv_heads, shape.v_dim)

    def _rows(self, tokens: Tensor, name: str, table: Tensor) -> Tensor:
        stores, key = self.row_gradients, name.replace(".", "_")
        if key in stores:
            return look_up_rows(tokens, table, cast(RowGradients, stores[key]))
        return self.look_up(tokens, table)
