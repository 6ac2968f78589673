"""The attention sub-layer, and the plan by which one forward pass attends.

A plan is made once per forward pass from tokens and window and is shared by all layers. It decides nothing about the
mathematics: `masks.allowed` does.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.core.units import BLOCK_TOKENS, round_up
from paceline.kernels.attention import (
    attend_chunked,
    attend_dense,
    attend_flex,
    attend_triangle,
    flex_block_mask,
)
from paceline.model.config import ModelConfig
from paceline.model.dtypes import torch_dtype
from paceline.model.linear import Product, linear, matrix
from paceline.model.masks import MaskRule, allowed, block_lists, dense_mask
from paceline.model.norm import rms_norm
from paceline.model.ranges import Ranges, ranges_of
from paceline.model.rotary import rotate

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q, k, v) -> attended values, (B, T, H, D)."""
Plan = Callable[[ModelConfig, Tensor | None, int, Tensor], Attend]
"""(config, documents, tokens, window) -> how this forward pass attends: the back end."""

CHUNK_TOKENS = 512
"""Queries of one chunk: a multiple of the block, large enough to keep the products busy."""
DENSE_LIMIT_TOKENS = 4_096
"""Up to here a dense mask is small, and one product is faster than chunks."""


@dataclass(frozen=True)
class Turn:
    """Rotary rows of the positions in this pass, each (T, pairs), or (B, T, pairs) where sequences stand at different
    ones."""

    cos: Tensor
    sin: Tensor


def plan_reference(config: ModelConfig, documents_BT: Tensor | None, tokens: int, window: Tensor) -> Attend:
    """Attention by the plain twin: causal, dense under a mask, or by chunks of queries for long windowed sequences."""
    rule, scale = MaskRule.of(config), config.head_dim**-0.5
    if rule.only_causal:
        return lambda _, q, k, v: attend_dense(q, k, v, None, scale=scale)
    reach = reach_tokens(config, tokens)
    if tokens <= DENSE_LIMIT_TOKENS or tokens % BLOCK_TOKENS or reach + CHUNK_TOKENS >= tokens:
        mask = dense_mask(rule, documents_BT, tokens, window)
        return lambda _, q, k, v: attend_triangle(q, k, v, mask, scale=scale, rows=CHUNK_TOKENS)
    mask = chunked_mask(rule, documents_BT, tokens, window, reach=reach, chunk=chunk_of(tokens))
    return lambda _, q, k, v: attend_chunked(q, k, v, mask, scale=scale)


def plan_flex(config: ModelConfig, documents_BT: Tensor | None, tokens: int, window: Tensor) -> Attend:
    """Attention by FlexAttention over the full and partial blocks; plainly causal presets keep the fused kernel."""
    rule, scale = MaskRule.of(config), config.head_dim**-0.5
    if rule.only_causal:
        return lambda _, q, k, v: attend_dense(q, k, v, None, scale=scale)
    lists = block_lists(rule, documents_BT, tokens, window)

    def test(b: Tensor, _: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """The whole rule, though the lists hold the block window: uncompiled, FlexAttention never looks at them."""
        if documents_BT is None:
            return allowed(rule, q, k, None, None, window)
        return allowed(rule, q, k, documents_BT[b, q], documents_BT[b, k], window)

    batch = 1 if documents_BT is None else documents_BT.size(0)
    mask = flex_block_mask(lists.full.expand(batch, -1, -1), lists.partial.expand(batch, -1, -1), test)
    return lambda _, q, k, v: attend_flex(q, k, v, mask, scale=scale)


PLANS: dict[str, Plan] = {"reference": plan_reference, "flex": plan_flex}
"""Back ends of plain PyTorch by the names that `--attention.backend` and the probe use."""


WINDOW_ON_HOST = ("varlen", "fa3")
"""Back ends that launch with the window as a number: where it lies on the device, they wait for it in every layer."""


def plan_named(name: str) -> Plan:
    """A back end by name. `ranges` needs Triton and a model without a `ranges_misfit`; the packed ones, imported only
    here, one without a `packed_misfit`."""
    if name in PLANS:
        return PLANS[name]
    return _plan_packed(name) if name in WINDOW_ON_HOST else plan_ranges


@dataclass(frozen=True)
class OverRanges:
    """Attention by our kernel over the interval of keys that each query sees. An `Attend`."""

    ranges: Ranges
    scale: float

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from paceline.kernels.attention_ranges import attend_ranges

        return attend_ranges(q, k, v, self.ranges.first_key, self.ranges.end_query, scale=self.scale)


def plan_ranges(config: ModelConfig, documents_BT: Tensor | None, tokens: int, window: Tensor) -> Attend:
    """`OverRanges`; what that cannot cut into blocks is left to FlexAttention."""
    rule = MaskRule.of(config)
    if rule.only_causal or tokens % BLOCK_TOKENS:
        return plan_flex(config, documents_BT, tokens, window)
    return OverRanges(ranges_of(rule, documents_BT, tokens, window), config.head_dim**-0.5)


def _plan_packed(library: str) -> Plan:
    from paceline.kernels.attention_packed import attend_packed, segment_starts, sequence_starts

    def plan_packed(config: ModelConfig, documents_BT: Tensor | None, tokens: int, window: Tensor) -> Attend:
        """Attention by FlashAttention, each document a segment."""
        rule, scale = MaskRule.of(config), config.head_dim**-0.5
        limit = window if rule.window_in_tokens else None
        starts = None if documents_BT is None else segment_starts(documents_BT)

        def attend(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            segments = sequence_starts(q.size(0), tokens, q.device) if starts is None else starts
            return attend_packed(q, k, v, segments, limit, scale=scale, library=library)

        return attend

    return plan_packed


def packed_misfit(config: ModelConfig) -> str | None:
    """Why FlashAttention over packed documents cannot compute such a model's attention, or None."""
    if MaskRule.of(config).window_in_blocks:
        return f"it counts a window in tokens from the query back, not --model.window.unit {config.window.unit}"
    return ranges_misfit(config)


def ranges_misfit(config: ModelConfig) -> str | None:
    """Why our attention kernel does not know such a model, or None."""
    if MaskRule.of(config).only_causal:
        return "a plainly causal mask is left to PyTorch's own kernel"
    if config.head_dim not in (64, 128):
        return f"it knows heads of 64 and 128, not --model.head-dim {config.head_dim}"
    return None


def reach_tokens(config: ModelConfig, tokens: int) -> int:
    """How far before a chunk the widest window of the schedule can see, in whole blocks."""
    if config.window.unit == "none":
        return tokens
    return min(tokens, round_up(config.window.widest_tokens, BLOCK_TOKENS))


def chunk_of(tokens: int) -> int:
    return next(n for n in (CHUNK_TOKENS, 256, BLOCK_TOKENS) if tokens % n == 0)


def chunked_mask(
    rule: MaskRule, documents_BT: Tensor | None, tokens: int, window: Tensor, *, reach: int, chunk: int
) -> Tensor:
    """(B or 1, chunks, chunk, reach + chunk) bool, read off the block lists: a full block is allowed as a whole, a
    partial one where the element test says so."""
    lists = block_lists(rule, documents_BT, tokens, window)
    starts = torch.arange(0, tokens, chunk, device=window.device)
    q = starts[:, None, None] + torch.arange(chunk, device=window.device)[:, None]  # (chunks, chunk, 1)
    k = starts[:, None, None] - reach + torch.arange(reach + chunk, device=window.device)  # (chunks, 1, keys)
    inside, k = k >= 0, k.clamp(min=0)
    test = inside & (k <= q)
    if rule.window_in_tokens:
        test = test & (q - k < window)
    if documents_BT is not None:
        test = test & (documents_BT[:, q] == documents_BT[:, k])
    q_block, k_block = q // BLOCK_TOKENS, k // BLOCK_TOKENS
    return (lists.full[:, q_block, k_block] & inside) | (lists.partial[:, q_block, k_block] & test)


Heads = tuple[Tensor, Tensor, Tensor, Tensor | None]
"""q (B, T, H, D), k and v (B, T, H_kv, D) as attention takes them, and the layer's own values before they were mixed,
where a later layer may ask for them."""
MakeHeads = Callable[["SelfAttention", Tensor, Tensor | None, Turn], Heads]
"""(module, x (B, T, width), extra, turn) -> heads: who computes projections, value mix, norm and rotary."""
AttendFrom = Callable[["SelfAttention", Tensor, Tensor, Tensor | None, Turn, Attend], tuple[Tensor, Tensor | None]]
"""(module, normalised stream, stream, extra, turn, attend) -> stream with attention's output added, (B, T, width), and
the layer's own values as above: who computes the whole sub-layer."""


class SelfAttention(nn.Module):
    """x (B, T, width) -> (B, T, width): projections, value mix, norm and rotary of q and k, attention, output, sum."""

    def __init__(self, config: ModelConfig, layer: int, attend_from: AttendFrom) -> None:
        super().__init__()
        self.config, self.layer, self.attend_from = config, layer, attend_from
        width, kv = config.width, config.kv_width
        if config.qkv == "fused":
            self.qkv = matrix(width + 2 * kv, width)
        else:
            self.query, self.key, self.value = matrix(width, width), matrix(kv, width), matrix(kv, width)
        self.output = matrix(width, width)
        if config.value_path != "plain":
            self.value_mix = nn.Parameter(torch.empty(config.value_lambdas))

    def forward(
        self, x: Tensor, stream: Tensor, extra: Tensor | None, turn: Turn, attend: Attend
    ) -> tuple[Tensor, Tensor | None]:
        """`stream` plus the attention of x, its normalised form. `extra`: what the value path mixes in, (B, T, H_kv,
        D), or None. Also returns this layer's own values, which the `residual` path hands to later layers."""
        return self.attend_from(self, x, stream, extra, turn, attend)

    def add_output(self, stream: Tensor, y: Tensor, product: Product = linear) -> Tensor:
        """The last product and the sum, for attended values (B, T, H, D)."""
        scale = self.config.attention_branch_scale
        branch = product(y.flatten(-2), self.output, self.config.precision)
        return stream + (branch if scale == 1.0 else scale * branch)

    def project(self, x: Tensor, product: Product = linear) -> tuple[Tensor, Tensor, Tensor]:
        c, kv = self.config, self.config.kv_width
        if c.qkv == "fused":
            q, k, v = product(x, self.qkv, c.precision).split([c.width, kv, kv], dim=-1)
        else:
            q, k, v = (product(x, w, c.precision) for w in (self.query, self.key, self.value))
        return (
            q.unflatten(-1, (c.num_heads, c.head_dim)),
            k.unflatten(-1, (c.kv_heads, c.head_dim)),
            v.unflatten(-1, (c.kv_heads, c.head_dim)),
        )

    def joined_projection(self) -> Tensor:
        """The three projections as one matrix ((H + 2 H_kv) D, width), whether they are kept as one or as three."""
        return self.qkv if self.config.qkv == "fused" else torch.cat([self.query, self.key, self.value])

    def mix_values(self, v: Tensor, extra: Tensor | None) -> Tensor:
        if self.config.value_lambdas == 1:
            mix = self.value_mix[0]
            return v if extra is None else (1 - mix) * v + mix * extra
        if extra is None and self.config.value_path == "residual":
            extra = v  # block 0 mixes with itself, which one scalar does not show
        scaled = self.value_mix[0] * v
        return scaled if extra is None else scaled + self.value_mix[1] * extra.to(v.dtype)

    def position(self, x: Tensor, turn: Turn) -> Tensor:
        c = self.config
        if c.qk_norm == "before_rotary":
            x = rms_norm(x, c.qk_norm_eps)
        x = rotate(x, turn.cos, turn.sin, c.rotary)
        return rms_norm(x, c.qk_norm_eps) if c.qk_norm == "after_rotary" else x


def make_heads(layer: SelfAttention, x: Tensor, extra: Tensor | None, turn: Turn, product: Product = linear) -> Heads:
    """The plain twin."""
    q, k, v = layer.project(x, product)
    mixed = v if layer.config.value_path == "plain" else layer.mix_values(v, extra)
    return layer.position(q, turn), layer.position(k, turn), mixed, v


def attend_from_plain(
    layer: SelfAttention, x: Tensor, stream: Tensor, extra: Tensor | None, turn: Turn, attend: Attend
) -> tuple[Tensor, Tensor | None]:
    """The plain twin."""
    q, k, v, own = make_heads(layer, x, extra, turn)
    return layer.add_output(stream, attend(layer.layer, q, k, v)), own


def attend_from_named(name: str) -> AttendFrom:
    """A back end by name; `fused` needs Triton, hence the imports here, and a model without a `heads_misfit`."""
    if name == "reference":
        return attend_from_plain
    from paceline.kernels.attention_joined import attend_joined
    from paceline.kernels.heads_fused import heads_fused

    def attended(layer: SelfAttention, x: Tensor, extra: Tensor | None, turn: Turn, attend: Attend) -> Tensor:
        """Over ranges it is one operation."""
        inputs = (*_stream_weight_extra_mix(layer, x, extra), turn.cos, turn.sin)
        if isinstance(attend, OverRanges):
            seen = (attend.ranges.first_key, attend.ranges.end_query)
            y = attend_joined(*inputs, *seen, *_eps_shape(layer.config), scale=attend.scale)
            return y.view(*x.shape[:-1], *y.shape[1:])
        q, k, v = (heads.unflatten(0, x.shape[:-1]) for heads in heads_fused(*inputs, *_eps_shape(layer.config)))
        return attend(layer.layer, q, k, v)

    def fused(
        layer: SelfAttention, x: Tensor, stream: Tensor, extra: Tensor | None, turn: Turn, attend: Attend
    ) -> tuple[Tensor, Tensor | None]:
        return layer.add_output(stream, attended(layer, x, extra, turn, attend)), None

    return fused


def _stream_weight_extra_mix(
    layer: SelfAttention, x: Tensor, extra: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """What the fused kernels take of a layer and its input, by rows."""
    c = layer.config
    dtype = torch_dtype(c.precision.compute)
    rows = None if extra is None else extra.flatten(0, 1)
    mix = None if c.value_path == "plain" else layer.value_mix
    return x.flatten(0, -2).to(dtype), layer.joined_projection().to(dtype), rows, mix


def _eps_shape(config: ModelConfig) -> tuple[float, tuple[int, int, int]]:
    return config.qk_norm_eps, (config.num_heads, config.kv_heads, config.head_dim)


def heads_misfit(config: ModelConfig) -> str | None:
    """Why the fused kernel cannot make the heads of such a model, or None."""
    if config.qk_norm != "before_rotary":
        return f"it knows a norm before the rotary only, not --model.qk-norm {config.qk_norm}"
    if config.value_path == "residual" or (config.value_path != "plain" and config.value_lambdas != 2):
        return f"it knows two mixing scalars and value tables only, not --model.value-path {config.value_path}"
    if config.head_dim & (config.head_dim - 1):
        return f"--model.head-dim {config.head_dim} is not a power of two"
    return None
