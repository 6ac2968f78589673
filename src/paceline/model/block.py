"""One block of the residual stream: skip, mix with x0, attention, MLP. Each part is there only if the layer has it."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from paceline.model.attention import Attend, AttentionForward, SelfAttention
from paceline.model.ops import MakeMatMul, SubLayer, declare, rms_norm
from paceline.model.rotary import RotaryCosSin
from paceline.settings import spec
from paceline.settings.model import LayerConfig, ModelConfig


def relu_squared(x: Tensor) -> Tensor:
    return F.relu(x).square()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "relu2": relu_squared}

MlpForward = Callable[["MLP", Tensor, Tensor], Tensor]
"""(module, normalised stream, stream), both (B, T, width) -> stream with the MLP's output added: the back end."""


def mlp_plain(mlp: "MLP", x: Tensor, stream: Tensor) -> Tensor:
    """The plain twin: product, activation, product, sum."""
    hidden = ACTIVATIONS[mlp.config.activation](mlp.matmuls["up"](x, mlp.up))
    return stream + mlp.matmuls["down"](hidden, mlp.down)


class MLP(SubLayer):
    up: nn.Parameter
    down: nn.Parameter

    def __init__(
        self, config: ModelConfig, layer: LayerConfig, forward_with: MlpForward, make_matmul: MakeMatMul
    ) -> None:
        super().__init__(config, spec.mlp(config, layer), make_matmul)
        self.forward_with = forward_with

    def forward(self, x: Tensor, stream: Tensor) -> Tensor:
        """`stream` plus the MLP of x, its normalised form."""
        return self.forward_with(self, x, stream)


Skip = tuple[Tensor, Tensor]
"""A weight, 0-D, and the stream after an earlier block."""


class Block(nn.Module):
    x0_mix: nn.Parameter

    def __init__(
        self,
        config: ModelConfig,
        layer: LayerConfig,
        attention: AttentionForward,
        mlp: MlpForward,
        make_matmul: MakeMatMul,
    ) -> None:
        super().__init__()
        self.config = config
        declare(self, spec.block(config))
        self.attention = None if layer.attention is None else SelfAttention(config, layer, attention, make_matmul)
        self.mlp = MLP(config, layer, mlp, make_matmul) if layer.mlp_width else None

    def forward(
        self, x: Tensor, x0: Tensor, value_embed: Tensor | None, rotary: RotaryCosSin, attend: Attend, skip: Skip | None
    ) -> tuple[Tensor, Tensor | None]:
        """The stream after this block, (B, T, width), and the block's own values if it has attention."""
        eps, raw_v = self.config.norm_eps, None
        if skip is not None:
            x = x + skip[0] * skip[1]
        if self.config.x0_mix:
            x = self.x0_mix[0] * x + self.x0_mix[1] * x0
        if self.attention is not None:
            x, raw_v = self.attention(rms_norm(x, eps), x, value_embed, rotary, attend)
        if self.mlp is not None:
            x = self.mlp(rms_norm(x, eps), x)
        return x, raw_v
