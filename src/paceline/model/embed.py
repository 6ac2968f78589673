"""Every lookup table: tokens, and the rows that the value path mixes into attention values."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.model.config import ModelConfig
from paceline.model.dtypes import torch_dtype

LookUp = Callable[[Tensor, Tensor], Tensor]
"""(tokens, table) -> rows, as `F.embedding`."""


class Embeddings(nn.Module):
    def __init__(self, config: ModelConfig, look_up: LookUp = F.embedding) -> None:
        super().__init__()
        self.config, self.look_up = config, look_up
        rows, dtype = config.embedding_rows, torch_dtype(config.precision.embeddings)
        self.token = nn.Parameter(torch.empty(rows, config.width, dtype=dtype))
        tables = config.value_tables
        if tables and config.value_storage == "chunks":
            self.value_chunks = nn.Parameter(torch.empty(rows, len(tables) * config.kv_width, dtype=dtype))
        elif tables:
            self.values = nn.ParameterDict()
            for table in tables:  # one by one: given all at once, it would put 10 before 2
                self.values[str(table)] = nn.Parameter(torch.empty(rows, config.kv_width, dtype=dtype))

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, T) -> (B, T, width) in the format of the residual stream."""
        stream = "fp32" if self.config.precision.mode == "autocast" else self.config.precision.compute
        return self.look_up(tokens, self.token).to(torch_dtype(stream))

    def value_rows(self, tokens: Tensor, table: int) -> Tensor:
        """(B, T) -> (B, T, H_kv, D): rows of one value table, looked up when its first layer asks."""
        c = self.config
        if c.value_storage == "chunks":
            chunk = c.value_tables.index(table)
            weight = self.value_chunks[:, chunk * c.kv_width : (chunk + 1) * c.kv_width]
        else:
            weight = self.values[str(table)]
        rows = self.look_up(tokens, weight).to(torch_dtype(c.precision.compute))
        return rows.view(*tokens.shape, c.kv_heads, c.head_dim)
