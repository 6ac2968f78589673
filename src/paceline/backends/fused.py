"""Sub-layers by kernels of our own, in the place of the plain twins in `model/`."""

import torch
from torch import Tensor

from paceline.backends.attention_plans import OverRanges
from paceline.kernels.attention_block import attend_joined
from paceline.kernels.mlp_fused import mlp_fused as mlp_kernel
from paceline.kernels.qkv_rope import qkv_rope
from paceline.model.attention import AttentionInputs, SelfAttention
from paceline.model.block import MLP
from paceline.model.ops import torch_dtype
from paceline.model.previous import OffsetKeys


def mlp_fused(mlp: MLP, x: Tensor, stream: Tensor) -> Tensor:
    dtype = torch_dtype(mlp.config.precision.compute)
    return stream + mlp_kernel(x.flatten(0, -2).to(dtype), mlp.up.to(dtype), mlp.matrix("down").to(dtype)).view(x.shape)


def attention_fused(
    module: SelfAttention, x: Tensor, stream: Tensor, inputs: AttentionInputs
) -> tuple[Tensor, Tensor | None]:
    """Over ranges, everything up to the attended values is one operation."""
    c, s, (value_embed, rotary, attend) = module.config, module.shape, inputs
    assert rotary is not None
    dtype = torch_dtype(c.precision.compute)
    rows = mix = None
    if value_embed is not None:
        rows = (module.gate_of(x, value_embed) * value_embed if c.value_gates else value_embed).flatten(0, 1)
    if c.value_gates:
        mix = None if rows is None else torch.ones(2, device=x.device)
    elif c.value_path != "plain":
        mix = module.value_mix
    if isinstance(attend, OffsetKeys) and not s.key_offset:
        attend = attend.attend
    given = (x.flatten(0, -2).to(dtype), module.joined_projection().to(dtype), rows, mix, rotary.cos, rotary.sin)
    heads = (s.num_heads, s.kv_heads, s.qk_dim)
    if isinstance(attend, OverRanges):
        seen = attend.of(module.layer)
        y = attend_joined(*given, seen.first_key, seen.end_query, c.qk_norm_eps, heads, scale=s.scale)
        return module.add_output(stream, y.view(*x.shape[:-1], *y.shape[1:])), None
    q, k, v = (part.unflatten(0, x.shape[:-1]) for part in qkv_rope(*given, c.qk_norm_eps, heads))
    return module.add_output(stream, attend(module.layer, q, k, v)), None
