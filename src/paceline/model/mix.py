"""Streams of earlier layers, added where `model.mixes` says, by weights that each token gives itself."""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from paceline.model.ops import declare, linear, torch_dtype
from paceline.settings import spec
from paceline.settings.model import MIX_SCALE, MixConfig, ModelConfig


class Mix(nn.Module):
    """x + Σ μ_k s_k over the sources s_k, (B, T, width) each, with μ = 0.1 (W gelu(U x) + b), (B, T, sources)."""

    hidden: nn.Parameter
    weights: nn.Parameter
    bias: nn.Parameter

    def __init__(self, config: ModelConfig, at: MixConfig) -> None:
        super().__init__()
        self.dtype = torch_dtype(config.precision.compute)
        declare(self, spec.mix(config, at))

    def forward(self, x: Tensor, sources: Sequence[Tensor]) -> Tensor:
        inner = F.gelu(linear(x, self.hidden, self.dtype))
        shares = (MIX_SCALE * (linear(inner, self.weights, self.dtype) + self.bias)).to(x.dtype)
        for share, source in zip(shares.unbind(-1), sources, strict=True):
            x = x + share[..., None] * source
        return x
