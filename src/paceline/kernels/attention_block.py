"""From the normalised stream to attended values in one operation, for a Hopper GPU with Triton. Plain twin: the heads
of `SelfAttention.qkv_of`, then `attend_dense`.

Forward it is `qkv_rope`, then `attention_ranges`. Backward the attention kernels carry their gradients on through
rotary, norm and value mix before they store them, each in its columns of one gradient of the joined projection: the
gradients of q, k and v never exist, and a pass over ten tensors of the stream's size falls away.
"""

from typing import Any

import torch
from torch import Tensor

from paceline.kernels.attention_ranges import attend_backward, attend_forward, check_heads, in_flight
from paceline.kernels.qkv_rope import empty_heads, empty_like, heads_gradients, make_heads, of_given, through_projection


def attend_joined(
    x: Tensor, weight: Tensor, value_embed: Tensor | None, mix: Tensor | None, cos: Tensor, sin: Tensor,
    first_key: Tensor, end_query: Tensor, eps: float, shape: tuple[int, int, int], *, scale: float,
) -> Tensor:  # fmt: skip
    """(N, H, D): attention of the heads that `qkv_rope` makes, over the keys that `attend_ranges` lets each query
    see; the arguments are theirs. N tokens in sequences of T, the length of cos, sin, first_key and end_query."""
    check_heads(first_key.size(1), shape[2])
    out, *_ = _attend(x, weight, value_embed, mix, cos, sin, first_key, end_query, eps, *shape, scale)
    return out


@torch.library.custom_op("paceline::attend_joined", mutates_args=())
def _attend(
    x: Tensor, weight: Tensor, value_embed: Tensor | None, mix: Tensor | None, cos: Tensor, sin: Tensor,
    first_key: Tensor, end_query: Tensor, eps: float, heads: int, kv_heads: int, width: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Attended values; for the backward pass log2 of the softmax sums and what `make_heads` gives."""
    qkv, mixed, norm = make_heads(x, weight, value_embed, mix, cos, sin, eps, heads, kv_heads, width)
    q, k, v = _by_sequence(first_key.size(1), *_parts(qkv, mixed, heads, kv_heads))
    out, lse = attend_forward(q, k, v, first_key, end_query, scale)
    return out.flatten(0, 1), lse, qkv, mixed, norm


def _parts(qkv: Tensor, mixed: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and the values that are attended to."""
    q, k, raw_v = qkv.split([heads, kv_heads, kv_heads], 1)
    return q, k, mixed if mixed.numel() else raw_v


def _by_sequence(tokens: int, *rows: Tensor) -> Any:
    """(N, heads, D) as (B, T, heads, D)."""
    return tuple(tensor.unflatten(0, (-1, tokens)) for tensor in rows)


@_attend.register_fake
def _(x, weight, value_embed, mix, cos, sin, first_key, end_query, eps, heads, kv_heads, width, scale):
    rows, tokens = x.size(0), first_key.size(1)
    lse = x.new_empty(rows // tokens, heads, tokens, dtype=torch.float32)
    return x.new_empty(rows, heads, width), lse, *empty_heads(x, mix, heads, kv_heads, width)


@torch.library.custom_op("paceline::attend_joined_backward", mutates_args=())
def _attend_backward(
    grad: Tensor, x: Tensor, weight: Tensor, value_embed: Tensor | None, mix: Tensor | None, cos: Tensor, sin: Tensor,
    first_key: Tensor, end_query: Tensor, out: Tensor, lse: Tensor, qkv: Tensor, mixed: Tensor, norm: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x, weight, value_embed and mix; the last two empty where there is none."""
    heads, tokens = out.size(1), first_key.size(1)
    kv_heads = qkv.size(1) - norm.size(1)
    q, k, v = _by_sequence(tokens, *_parts(qkv, mixed, heads, kv_heads))
    grad, out = _by_sequence(tokens, grad, out)
    if not in_flight(q):  # under the interpreter: one after the other
        grads = attend_backward(grad, q, k, v, out, lse, first_key, end_query, scale)
        return heads_gradients(*(g.flatten(0, 1) for g in grads), x, weight, value_embed, mix, cos, sin, qkv, norm)
    from paceline.kernels.attention_async import BACKWARD_KEYS, Raw, fill_gradients

    grad_qkv, grad_embed = torch.empty_like(qkv), empty_like(value_embed, x)
    parts = x.new_zeros(len(x) // BACKWARD_KEYS.keys * kv_heads, 2, dtype=torch.float32)
    raw = Raw(cos, sin, norm, qkv[:, heads + kv_heads :], mix, value_embed, grad_embed, parts)
    grads = _by_sequence(tokens, *grad_qkv.split([heads, kv_heads, kv_heads], 1))
    fill_gradients(grads, grad, q, k, v, out, lse, first_key, end_query, scale, raw)
    return through_projection(grad_qkv, grad_embed, parts, x, weight, mix, kv_heads)


@_attend_backward.register_fake
def _(grad, *given):
    return tuple(empty_like(tensor, given[0]) for tensor in given[:4])


def _keep(ctx, inputs, output):
    *tensors, _eps, _heads, _kv_heads, _width, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx, grad, *_):
    saved = ctx.saved_tensors  # read once: recomputation gives each tensor once
    grads = _attend_backward(grad.contiguous(), *saved, ctx.scale)
    return *of_given(grads, saved[:4]), *(None,) * 9


_attend.register_autograd(_backward, setup_context=_keep)
