"""Every lookup table: tokens, and the rows that the value path mixes into attention values."""

from collections.abc import Callable
from typing import cast

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

    def __init__(self, config: ModelConfig, look_up: LookUp = F.embedding) -> None:
        super().__init__()
        self.config, self.look_up = config, look_up
        self.row_gradients = nn.ModuleDict()
        """By the name of the table, dots written as underscores: tables whose gradient is kept as rows."""
        declare(self, spec.embeddings(config))

    def forward(self, tokens: Tensor, positions: Tensor | slice) -> Tensor:
        """(B, T) -> (B, T, width) in the format of the residual stream; `positions` says where the tokens stand."""
        stream = "fp32" if self.config.precision.mode == "autocast" else self.config.precision.compute
        rows = self._rows(tokens, "token", self.token)
        if self.config.positions == "learned":
            rows = rows + self.position[positions]
        return rows.to(torch_dtype(stream))

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
        if name in self.row_gradients:
            return look_up_rows(tokens, table, cast(RowGradients, self.row_gradients[name]))
        return self.look_up(tokens, table)
