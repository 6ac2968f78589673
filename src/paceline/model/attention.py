"""Self-attention: projections, values mixed with looked-up rows, norm and rotary of q and k, attention, output.

A forward pass is planned once: `Plan` looks at documents and windows and gives `Attend`, which every layer then calls.
Other back ends of the plan and of the sub-layer are in `backends/`; here is the plain twin of each. Shape letters: B
sequences, T tokens, H query heads, H_kv key and value heads, D head width (of values it may be another).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from paceline.core.units import BLOCK_TOKENS
from paceline.kernels.attention import attend_chunked, attend_dense, attend_triangle
from paceline.model.masks import MaskRule, allowed, dense_mask
from paceline.model.ops import MakeMatMul, MatMul, SubLayer, rms_norm
from paceline.model.rotary import RotaryCosSin, rotate
from paceline.settings import backends as sizes
from paceline.settings import spec
from paceline.settings.model import GATE_INPUTS, AttentionLayer, LayerConfig, ModelConfig, WindowKind

Attend = Callable[[LayerConfig, Tensor, Tensor, Tensor], Tensor]
"""(layer, q, k, v) -> attended values, (B, T, H, D)."""
Plan = Callable[[ModelConfig, Tensor | None, int, Tensor], Attend]
"""(config, documents, tokens, windows) -> how this forward pass attends: the back end. `windows` (kinds,) int32 holds
the window of each kind in tokens, in the order of `ModelConfig.windows`."""


def by_window(config: ModelConfig, windows: Tensor, make: Callable[[WindowKind, Tensor], Attend]) -> Attend:
    """An `Attend` that hands each layer to the one that `make` gives for its window kind. All are made at once: a block
    that is computed again must leave nothing behind."""
    kinds = list(config.windows) or ["short"]
    used = dict.fromkeys(shape.window for shape in config.attending)
    made = {kind: make(kind, windows[kinds.index(kind)]) for kind in used}
    return lambda layer, q, k, v: made[attention_of(layer).window](layer, q, k, v)


def attention_of(layer: LayerConfig) -> AttentionLayer:
    assert layer.attention is not None
    return layer.attention


def plan_reference(config: ModelConfig, documents_BT: Tensor | None, tokens: int, windows: Tensor) -> Attend:
    """Attention by the plain twin: causal, dense under a mask, or by chunks of queries for long windowed sequences."""
    rule = MaskRule.of(config)
    if rule.only_causal:
        return lambda layer, q, k, v: attend_dense(q, k, v, None, scale=attention_of(layer).scale)

    def make(kind: WindowKind, window: Tensor) -> Attend:
        if (reach := sizes.chunk_reach(config, tokens, kind)) is None:
            dense, rows = dense_mask(rule, documents_BT, tokens, window), sizes.CHUNK_TOKENS
            return lambda layer, q, k, v: attend_triangle(q, k, v, dense, scale=attention_of(layer).scale, rows=rows)
        chunked = chunked_mask(rule, documents_BT, tokens, window, reach=reach, chunk=chunk_of(tokens))
        return lambda layer, q, k, v: attend_chunked(q, k, v, chunked, scale=attention_of(layer).scale)

    return by_window(config, windows, make)


def chunk_of(tokens: int) -> int:
    return next(n for n in (sizes.CHUNK_TOKENS, 256, BLOCK_TOKENS) if tokens % n == 0)


def chunked_mask(
    rule: MaskRule, documents_BT: Tensor | None, tokens: int, window: Tensor, *, reach: int, chunk: int
) -> Tensor:
    """(B or 1, chunks, chunk, reach + chunk) bool: what each chunk's queries see of the keys up to its end."""
    starts = torch.arange(0, tokens, chunk, device=window.device)
    q = starts[:, None, None] + torch.arange(chunk, device=window.device)[:, None]  # (chunks, chunk, 1)
    k = starts[:, None, None] - reach + torch.arange(reach + chunk, device=window.device)  # (chunks, 1, keys)
    inside, k = k >= 0, k.clamp(min=0)
    q_doc = k_doc = None
    if documents_BT is not None:
        q_doc, k_doc = documents_BT[:, q], documents_BT[:, k]
    mask = inside & allowed(rule, q, k, q_doc, k_doc, window)
    return mask if mask.dim() == 4 else mask[None]


class AttentionInputs(NamedTuple):
    """What a layer's attention takes besides the stream."""

    value_embed: Tensor | None
    """What the value path mixes in, (B, T, H_kv, D)."""
    rotary: RotaryCosSin | None
    attend: Attend


AttentionForward = Callable[["SelfAttention", Tensor, Tensor, AttentionInputs], tuple[Tensor, Tensor | None]]
"""(module, normalised stream, stream, its other inputs) -> stream with attention's output added, (B, T, width), and
the layer's own values before they were mixed: the back end of the whole sub-layer."""


class SelfAttention(SubLayer):
    query: nn.Parameter
    key: nn.Parameter
    value: nn.Parameter
    qkv: nn.Parameter
    output: nn.Parameter
    value_mix: nn.Parameter
    value_gate: nn.Parameter
    query_bias: nn.Parameter
    key_bias: nn.Parameter
    value_bias: nn.Parameter

    def __init__(
        self, config: ModelConfig, layer: LayerConfig, forward_with: AttentionForward, make_matmul: MakeMatMul
    ) -> None:
        super().__init__(config, spec.attention(config, attention_of(layer)), make_matmul)
        self.layer, self.shape, self.forward_with = layer, attention_of(layer), forward_with

    def forward(self, x: Tensor, stream: Tensor, inputs: AttentionInputs) -> tuple[Tensor, Tensor | None]:
        """`stream` plus the attention of x, its normalised form. Also returns this layer's own values, which the
        `residual` path hands to later layers."""
        return self.forward_with(self, x, stream, inputs)

    def qkv_of(
        self, x: Tensor, value_embed: Tensor | None, rotary: RotaryCosSin | None, matmul: MatMul | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The plain twin of projections, value mix, norm and rotary: q (B, T, H, D), k and v (B, T, H_kv, D), and v
        before it was mixed. `matmul` takes the place of the layer's own."""
        q, k, v = self.project(x, matmul)
        mixed = v if self.config.value_path == "plain" else self.mix_values(x, v, value_embed)
        return self.position(q, rotary), self.position(k, rotary), mixed, v

    def add_output(self, stream: Tensor, y: Tensor, matmul: MatMul | None = None) -> Tensor:
        """The last product and the sum, for attended values (B, T, H, D)."""
        scale = self.config.attention_branch_scale
        branch = self.product("output", y.flatten(-2), matmul)
        return stream + (branch if scale == 1.0 else scale * branch)

    def project(self, x: Tensor, matmul: MatMul | None = None) -> tuple[Tensor, Tensor, Tensor]:
        s = self.shape
        if self.config.qkv == "fused":
            joined = self.product("qkv", x, matmul)
            q, k, v = joined.split([s.q_width, s.k_width, s.v_width], dim=-1)
        else:
            q, k, v = (self.product(name, x, matmul) for name in ("query", "key", "value"))
        q, k = q.unflatten(-1, (s.num_heads, s.qk_dim)), k.unflatten(-1, (s.kv_heads, s.qk_dim))
        return q, k, v.unflatten(-1, (s.kv_heads, s.v_dim))

    def joined_projection(self) -> Tensor:
        """The three projections as one matrix, whether they are kept as one or as three."""
        joined: Tensor = self.qkv if self.config.qkv == "fused" else torch.cat([self.query, self.key, self.value])
        return joined

    def mix_values(self, x: Tensor, v: Tensor, value_embed: Tensor | None) -> Tensor:
        if self.config.value_gates:
            return v if value_embed is None else v + self.gate_of(x, value_embed) * value_embed.to(v.dtype)
        if self.config.value_lambdas == 1:
            mix = self.value_mix[0]
            return v if value_embed is None else (1 - mix) * v + mix * value_embed
        if value_embed is None and self.config.value_path == "residual":
            value_embed = v  # block 0 mixes with itself, which one scalar does not show
        scaled = self.value_mix[0] * v
        return scaled if value_embed is None else scaled + self.value_mix[1] * value_embed.to(v.dtype)

    def gate_of(self, x: Tensor, value_embed: Tensor) -> Tensor:
        """(B, T, H_kv, 1), from 0 to 2."""
        read = torch.cat([x[..., :GATE_INPUTS], value_embed.flatten(-2)[..., :GATE_INPUTS]], dim=-1).float()
        return (2 * torch.sigmoid(read @ self.value_gate.T))[..., None].to(value_embed.dtype)

    def position(self, x: Tensor, rotary: RotaryCosSin | None) -> Tensor:
        c = self.config
        if c.qk_norm == "before_rotary":
            x = rms_norm(x, c.qk_norm_eps)
        if rotary is not None:
            x = rotate(x, rotary, c.rotary)
        return rms_norm(x, c.qk_norm_eps) if c.qk_norm == "after_rotary" else x


def attention_plain(
    module: SelfAttention, x: Tensor, stream: Tensor, inputs: AttentionInputs
) -> tuple[Tensor, Tensor | None]:
    """The plain twin."""
    q, k, v, raw_v = module.qkv_of(x, inputs.value_embed, inputs.rotary)
    return module.add_output(stream, inputs.attend(module.layer, q, k, v)), raw_v
