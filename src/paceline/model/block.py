"""One block of the residual stream: mix with x0, attention, MLP. Each part is there only if its switch is on."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.model.attention import Attend, SelfAttention, Turn
from paceline.model.config import ModelConfig
from paceline.model.linear import linear, matrix
from paceline.model.norm import rms_norm


def relu_squared(x: Tensor) -> Tensor:
    return F.relu(x).square()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "relu2": relu_squared}


class MLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.up = matrix(config.mlp_width, config.width)
        self.down = matrix(config.width, config.mlp_width)

    def forward(self, x: Tensor) -> Tensor:
        hidden = ACTIVATIONS[self.config.activation](linear(x, self.up, self.config.precision))
        return linear(hidden, self.down, self.config.precision)


class Block(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.config = config
        if config.x0_mix:
            self.x0_mix = nn.Parameter(torch.empty(2))
        self.attention = None if layer in config.attentionless else SelfAttention(config, layer)
        self.mlp = MLP(config)

    def forward(
        self, x: Tensor, x0: Tensor, extra: Tensor | None, turn: Turn, attend: Attend
    ) -> tuple[Tensor, Tensor | None]:
        """The stream after this block, (B, T, width), and the block's own values if it has attention."""
        eps, own = self.config.norm_eps, None
        if self.config.x0_mix:
            x = self.x0_mix[0] * x + self.x0_mix[1] * x0
        if self.attention is not None:
            branch, own = self.attention(rms_norm(x, eps), extra, turn, attend)
            scale = self.config.attention_branch_scale
            x = x + (branch if scale == 1.0 else scale * branch)
        return x + self.mlp(rms_norm(x, eps)), own
