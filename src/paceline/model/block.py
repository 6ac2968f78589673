"""One block of the residual stream: skip, mix with x0, attention, MLP. Each part is there only if its switch is on."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.model.attention import Attend, AttendFrom, SelfAttention, Turn, attend_from_plain
from paceline.model.config import ModelConfig
from paceline.model.dtypes import torch_dtype
from paceline.model.linear import linear, matrix
from paceline.model.norm import rms_norm


def relu_squared(x: Tensor) -> Tensor:
    return F.relu(x).square()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "relu2": relu_squared}


FeedForward = Callable[["MLP", Tensor, Tensor], Tensor]
"""(module, normalised stream, stream), both (B, T, width) -> stream with the MLP's output added: who computes it."""


def feed_forward(mlp: "MLP", x: Tensor, stream: Tensor) -> Tensor:
    """The plain twin: product, activation, product, sum."""
    c = mlp.config
    hidden = ACTIVATIONS[c.activation](linear(x, mlp.up, c.precision))
    return stream + linear(hidden, mlp.down, c.precision)


def feed_forward_named(name: str) -> FeedForward:
    """A back end by name; `fused` needs Triton, hence the import here."""
    if name == "reference":
        return feed_forward
    from paceline.kernels.mlp_fused import mlp_fused

    def fused(mlp: "MLP", x: Tensor, stream: Tensor) -> Tensor:
        dtype = torch_dtype(mlp.config.precision.compute)
        return stream + mlp_fused(x.flatten(0, -2).to(dtype), mlp.up.to(dtype), mlp.down.to(dtype)).view(x.shape)

    return fused


class MLP(nn.Module):
    def __init__(self, config: ModelConfig, feed_forward: FeedForward) -> None:
        super().__init__()
        self.config, self.feed_forward = config, feed_forward
        self.up = matrix(config.mlp_width, config.width)
        self.down = matrix(config.width, config.mlp_width)

    def forward(self, x: Tensor, stream: Tensor) -> Tensor:
        """`stream` plus the MLP of x, its normalised form."""
        return self.feed_forward(self, x, stream)


Skip = tuple[Tensor, Tensor]
"""A weight, 0-D, and the stream after an earlier block."""


class Block(nn.Module):
    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        attend_from: AttendFrom = attend_from_plain,
        feed_forward: FeedForward = feed_forward,
    ) -> None:
        super().__init__()
        self.config = config
        if config.x0_mix:
            self.x0_mix = nn.Parameter(torch.empty(2))
        self.attention = None if layer in config.attentionless else SelfAttention(config, layer, attend_from)
        self.mlp = MLP(config, feed_forward)

    def forward(
        self, x: Tensor, x0: Tensor, extra: Tensor | None, turn: Turn, attend: Attend, skip: Skip | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The stream after this block, (B, T, width), and the block's own values if it has attention."""
        eps, own = self.config.norm_eps, None
        if skip is not None:
            x = x + skip[0] * skip[1]
        if self.config.x0_mix:
            x = self.x0_mix[0] * x + self.x0_mix[1] * x0
        if self.attention is not None:
            x, own = self.attention(rms_norm(x, eps), x, extra, turn, attend)
        return self.mlp(rms_norm(x, eps), x), own
