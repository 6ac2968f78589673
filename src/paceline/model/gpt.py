"""The whole model: embeddings, blocks with their skips, head. Only mathematics; it knows no ranks, files or clocks.

Shape letters: B sequences, T tokens, H heads, D head width. The window is a 0-D int tensor, in tokens.
"""

from collections.abc import Callable
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.model.attention import Attend, AttendFrom, Plan, Turn, attend_from_plain, plan_reference
from paceline.model.block import Block, FeedForward, Skip, feed_forward
from paceline.model.config import ModelConfig
from paceline.model.dtypes import torch_dtype
from paceline.model.embed import Embeddings, LookUp
from paceline.model.init import initialise
from paceline.model.linear import matrix
from paceline.model.loss import HeadLoss, cap_logits, head_loss
from paceline.model.masks import document_ids
from paceline.model.norm import rms_norm
from paceline.model.rotary import rotary_tables

ParamClass = Literal["matrices", "embeddings", "head", "scalars"]
RunBlock = Callable[[nn.Module, Tensor, Tensor, Tensor | None, Turn, Attend, Skip | None], tuple[Tensor, Tensor | None]]
"""(block, and what `Block.forward` takes) -> what it returns."""


def run_plainly(
    block: nn.Module, x: Tensor, x0: Tensor, extra: Tensor | None, turn: Turn, attend: Attend, skip: Skip | None
) -> tuple[Tensor, Tensor | None]:
    found: tuple[Tensor, Tensor | None] = block(x, x0, extra, turn, attend, skip)
    return found


class GPT(nn.Module):
    rotary_cos: Tensor
    rotary_sin: Tensor

    def __init__(
        self,
        config: ModelConfig,
        *,
        end_of_text: int,
        seed: int = 0,
        plan: Plan = plan_reference,
        loss: HeadLoss = head_loss,
        run_block: RunBlock = run_plainly,
        attend_from: AttendFrom = attend_from_plain,
        feed_forward: FeedForward = feed_forward,
        look_up: LookUp = F.embedding,
        first_position: int = 0,
    ) -> None:
        """`plan`, `loss`, `attend_from`, `feed_forward` and `look_up` are back ends of the same mathematics;
        `run_block` may wrap every block but not change what it computes; `seed` decides the initial weights.
        `first_position`: where in its sequence the first token stands that a pass is given."""
        super().__init__()
        self.config, self.end_of_text, self.first_position = config, end_of_text, first_position
        self.plan, self.loss, self.run_block = plan, loss, run_block
        self.embeddings = Embeddings(config, look_up)
        self.blocks = nn.ModuleList(
            Block(config, layer, attend_from, feed_forward) for layer in range(config.num_layers)
        )
        if config.unet_skips:
            self.skip_weights = nn.Parameter(torch.empty(config.num_layers // 2))
        if not config.tied_head:
            self.head = matrix(config.head_rows, config.width)
        cos, sin = rotary_tables(config.rotary, config.head_dim)
        self.register_buffer("rotary_cos", cos, persistent=False)
        self.register_buffer("rotary_sin", sin, persistent=False)
        initialise(self, config, seed)

    def forward(self, tokens: Tensor, targets: Tensor, window: Tensor) -> Tensor:
        """Loss of every token, (B, T) fp32; only their total, 0-D, where the head's back end gives no more. Who adds
        them up need not care."""
        x = self._head_input(self._stream_of(tokens, window)).flatten(0, -2)
        losses = self.loss(x, self._head_rows(), targets.flatten(), self.config.softcap)
        return losses.view(targets.shape) if losses.dim() else losses

    def logits(self, tokens: Tensor, window: Tensor) -> Tensor:
        """(B, T, head rows) fp32, capped."""
        return self.head_of(self._stream_of(tokens, window))

    def head_of(self, x: Tensor) -> Tensor:
        """Logits from the residual stream."""
        return cap_logits(F.linear(self._head_input(x), self._head_rows()), self.config.softcap)

    def _head_input(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.config.norm_eps).to(torch_dtype(self.config.precision.compute))

    def _head_rows(self) -> Tensor:
        weight: Tensor = self.embeddings.token if self.config.tied_head else self.head
        return weight.to(torch_dtype(self.config.precision.compute))

    def _stream_of(self, tokens: Tensor, window: Tensor) -> Tensor:
        documents = document_ids(tokens, self.end_of_text) if self.config.document_mask else None
        attend = self.plan(self.config, documents, tokens.size(-1), window)
        start, end = self.first_position, self.first_position + tokens.size(-1)
        return self.stream(tokens, attend, Turn(self.rotary_cos[start:end], self.rotary_sin[start:end]))

    def stream(self, tokens: Tensor, attend: Attend, turn: Turn) -> Tensor:
        """The residual stream after the last block, (B, T, width); `turn` says where the tokens stand."""
        x: Tensor = self.embeddings(tokens)
        if self.config.embedding_norm:
            x = rms_norm(x, self.config.norm_eps)
        x0, values = x, _Values(self, tokens)
        skips: list[Tensor] = []
        half = self.config.num_layers // 2
        for layer, block in enumerate(self.blocks):
            skip = (self.skip_weights[layer - half], skips.pop()) if self.config.unet_skips and layer >= half else None
            x, own = self.run_block(block, x, x0, values.extra(layer), turn, attend, skip)
            values.remember(layer, own)
            if self.config.unet_skips and layer < half:
                skips.append(x)
        return x

    def parameter_classes(self) -> dict[ParamClass, dict[str, nn.Parameter]]:
        """Parameters by the class that optimizer and precision settings speak of, in a fixed order."""
        classes: dict[ParamClass, dict[str, nn.Parameter]] = {kind: {} for kind in get_args(ParamClass)}
        for name, parameter in self.named_parameters():
            classes[parameter_class(name, parameter)][name] = parameter
        return classes

    def fused_parts(self) -> dict[str, tuple[int, ...]]:
        """Matrices that are several stacked in rows (fused q, k, v), with the rows of each."""
        c = self.config
        rows = (c.num_heads * c.head_dim, c.kv_width, c.kv_width)
        return {name: rows for name, _ in self.named_parameters() if name.endswith("attention.qkv")}


def parameter_class(name: str, parameter: Tensor) -> ParamClass:
    if name.startswith("embeddings."):
        return "embeddings"
    if name == "head":
        return "head"
    return "matrices" if parameter.dim() == 2 else "scalars"


class _Values:
    """What the value path mixes into each layer during one forward pass."""

    def __init__(self, model: GPT, tokens: Tensor) -> None:
        self.model, self.tokens = model, tokens
        self.rows: dict[int, Tensor] = {}  # tables looked up so far; a second layer uses the same rows
        self.first: Tensor | None = None

    def extra(self, layer: int) -> Tensor | None:
        table = self.model.config.value_table_of_layer[layer]
        if table is None:
            return self.first
        if table not in self.rows:
            self.rows[table] = self.model.embeddings.value_rows(self.tokens, table)
        return self.rows[table]

    def remember(self, layer: int, own: Tensor | None) -> None:
        if layer == 0 and self.model.config.value_path == "residual":
            self.first = own
