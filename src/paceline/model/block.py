"""One block of the residual stream: skip, mix with x0, attention, MLP. Each part is there only if the layer has it."""

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from paceline.core.errors import ConfigError
from paceline.model.attention import Attend, AttentionForward, AttentionInputs, SelfAttention
from paceline.model.ops import MakeMatMul, Norm, SubLayer, declare
from paceline.model.rotary import RotaryCosSin
from paceline.settings import plugins, spec
from paceline.settings.model import LayerConfig, ModelConfig


def relu_squared(x: Tensor) -> Tensor:
    return F.relu(x).square()


Activation = Callable[[Tensor], Tensor]
ACTIVATIONS: dict[str, Activation] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu2": relu_squared,
    "swiglu": F.silu,  # of the gate
}


def activation(name: str) -> Activation:
    """Our own, or that of a plug-in."""
    found: Activation | None = ACTIVATIONS.get(name) or plugins.find("activations", name)
    if found is None:
        raise ConfigError(
            f"--model.activation {name!r:.60}: nothing of that name is loaded; a plug-in's needs --plugin"
        )
    return found


MlpForward = Callable[["MLP", Tensor, Tensor], Tensor]
"""(module, normalised stream, stream), both (B, T, width) -> stream with the MLP's output added: the back end."""


def mlp_plain(mlp: "MLP", x: Tensor, stream: Tensor) -> Tensor:
    """The plain twin: product, activation, product, sum."""
    gated = mlp.config.gated
    hidden = mlp.activation(mlp.product("gate" if gated else "up", x))
    return stream + mlp.product("down", hidden * mlp.product("up", x) if gated else hidden)


class MLP(SubLayer):
    gate: nn.Parameter
    up: nn.Parameter
    down: nn.Parameter

    def __init__(
        self, config: ModelConfig, layer: LayerConfig, forward_with: MlpForward, make_matmul: MakeMatMul
    ) -> None:
        super().__init__(config, spec.mlp(config, layer), make_matmul)
        self.forward_with, self.activation = forward_with, activation(config.activation)

    def forward(self, x: Tensor, stream: Tensor) -> Tensor:
        """`stream` plus the MLP of x, its normalised form."""
        return self.forward_with(self, x, stream)


Skip = tuple[Tensor, Tensor]
"""A weight, 0-D, and the stream after an earlier block."""


class Block(nn.Module):
    x0_mix: nn.Parameter
    residual_scales: nn.Parameter
    x0_gate: nn.Parameter
    ngram_gate: nn.Parameter

    def __init__(
        self,
        config: ModelConfig,
        layer: LayerConfig,
        attention: AttentionForward,
        mlp: MlpForward,
        make_matmul: MakeMatMul,
    ) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        declare(self, spec.block(config, layer))
        self.attention_norm = None if layer.attention is None else Norm(config)
        self.attention = None if layer.attention is None else SelfAttention(config, layer, attention, make_matmul)
        self.mlp_norm = Norm(config) if layer.mlp_width else None
        self.mlp = MLP(config, layer, mlp, make_matmul) if layer.mlp_width else None
        self.drop = None
        if config.dropout:
            from paceline.model.dropout import Dropout

            self.drop = Dropout(config.dropout, place=2 * layer.index + 1)

    def forward(
        self,
        x: Tensor,
        x0: Tensor,
        value_embed: Tensor | None,
        rotary: RotaryCosSin | None,
        attend: Attend,
        skip: Skip | None,
        keys: Tensor | None = None,
        attended: Tensor | None = None,
        ngrams: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """The stream after this block, (B, T, width), and the block's own values if it has attention. `keys` (B, T):
        what decides which numbers are dropped; None: none are. `attended`: the stream that attention reads, if not
        its own; `ngrams` (B, T, width): what the n-gram gate adds."""
        raw_v = None
        if skip is not None:
            x = x + skip[0] * skip[1]
        if self.config.x0_mix:
            x = self.x0_mix[0] * x + self.x0_mix[1] * x0
        normed = None if self.attention_norm is None else self.attention_norm(x if attended is None else attended)
        x = self._kept(x, 0)
        if self.layer.x0_gate:
            x = x + self.x0_gate * x0
        if ngrams is not None:
            x = x + self.ngram_gate * ngrams
        if self.attention is not None and normed is not None:
            inputs = AttentionInputs(value_embed, rotary, attend)
            if self.drop is None or keys is None:
                x, raw_v = self.attention(normed, x, inputs)
            else:  # the branch alone: added to 0
                branch, raw_v = self.attention(normed, x.new_zeros(()), inputs)
                x = x + self.drop(branch, keys)
        if self.mlp is not None and self.mlp_norm is not None:
            normed = self.mlp_norm(x)
            x = self._kept(x, 1)
            if self.drop is None or keys is None:
                x = self.mlp(normed, x)
            else:
                x = x + self.drop(self.mlp(normed, x.new_zeros(())), keys, second=True)
        return x, raw_v

    def _kept(self, x: Tensor, sub_layer: int) -> Tensor:
        """What a sub-layer is added to."""
        return self.residual_scales[sub_layer] * x if self.config.residual_scales else x
