"""From the stream to the heads of attention: projections, norm, rotary, value mix. Plain twin: `model.attention`.

One product of the library, then one kernel that normalises and rotates queries and keys where they lie and mixes the
values: y = R(x s), R the rotation and s = (mean x² + ε)^-½, is kept with s, and from both the gradient follows: dx =
s·R⁻¹(dy - y·mean(dy·y)), because a rotation keeps inner products. Raw values are kept for the gradient of the mixing
scalars. Tried and dropped: heads in the ending of a product of our own, and two products (docs/experiments.md).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TOKENS, WARPS = 8, 4
"""Tokens of one program, which works on one head of them at a time."""


def qkv_rope(
    x: Tensor, weight: Tensor, value_embed: Tensor | None, mix: Tensor | None, cos: Tensor, sin: Tensor, eps: float,
    shape: tuple[int, int, int],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """q (N, H, D), k and v (N, H_kv, D) of x (N, width) by weight ((H + 2 H_kv) D, width), `shape` being (H, H_kv, D).

    q and k are RMS-normalised with `eps`, then their first P pairs rotated by cos and sin (T, P), N a multiple of T.
    v ← mix[0]·v + mix[1]·value_embed (N, H_kv, D); the first term only without `value_embed`, v without `mix` (2,)."""
    qkv, mixed, _ = make_heads(x, weight, value_embed, mix, cos, sin, eps, *shape)
    q, k, raw_v = qkv.split([shape[0], shape[1], shape[1]], 1)
    return q, k, raw_v if mix is None else mixed


@triton.jit
def load_angles(cos_ptr, sin_ptr, position, column, inside, PAIRS: tl.constexpr):
    """Cosines and sines (positions, columns): those of a pair that does not rotate are 1 and 0."""
    rotates = inside & (column < PAIRS)
    angle = position * PAIRS + column
    cos = tl.load(cos_ptr + angle, mask=rotates, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + angle, mask=rotates, other=0.0).to(tl.float32)
    return cos, sin


@triton.jit
def raw_gradient(grad_a, grad_b, a, b, scale, cos, sin, HALF: tl.constexpr):
    """The gradient of x, given that of y = R(x s), y itself and s (rows,): s·R⁻¹(dy - y·mean(dy·y))."""
    along = ((tl.sum(grad_a * a, 1) + tl.sum(grad_b * b, 1)) * (1.0 / (2 * HALF)))[:, None]
    da, db = grad_a - a * along, grad_b - b * along
    return (da * cos - db * sin) * scale[:, None], (da * sin + db * cos) * scale[:, None]


@triton.jit
def heads_forward(
    qkv_ptr, embed_ptr, mix_ptr, cos_ptr, sin_ptr, mixed_ptr, scale_ptr, rows, sequence, eps, NORMED: tl.constexpr,
    KV_HEADS: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr, EMBED: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """TOKENS rows: the second program of them mixes the values, the first normalises and rotates NORMED queries and
    keys in place, one head after another by the same angles."""
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    row = tokens[:, None]
    column = tl.arange(0, HALF)[None, :]
    inside = (row < rows) & (column < HALF)  # always true, for the shape
    place = qkv_ptr + row * ((NORMED + KV_HEADS) * 2 * HALF) + column
    if tl.program_id(1) == 0:
        cos, sin = load_angles(cos_ptr, sin_ptr, row % sequence, column, inside, PAIRS)
        for head in range(NORMED):
            a = tl.load(place, mask=inside, other=0.0).to(tl.float32)
            b = tl.load(place + HALF, mask=inside, other=0.0).to(tl.float32)
            scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) * (1.0 / (2 * HALF)) + eps)
            tl.store(scale_ptr + tokens * NORMED + head, scale, mask=tokens < rows)
            rotated_a = (a * cos + b * sin) * scale[:, None]
            rotated_b = (b * cos - a * sin) * scale[:, None]
            tl.store(place, rotated_a.to(qkv_ptr.dtype.element_ty), mask=inside)
            tl.store(place + HALF, rotated_b.to(qkv_ptr.dtype.element_ty), mask=inside)
            place += 2 * HALF
    else:
        raw_share = tl.load(mix_ptr).to(tl.float32)
        share = raw_share
        if EMBED:
            share = tl.load(mix_ptr + 1).to(tl.float32)
        place += NORMED * 2 * HALF
        for half in range(2 * KV_HEADS):
            offset = row * (KV_HEADS * 2 * HALF) + half * HALF + column
            value = raw_share * tl.load(place + half * HALF, mask=inside, other=0.0).to(tl.float32)
            if EMBED:
                value += share * tl.load(embed_ptr + offset, mask=inside, other=0.0).to(tl.float32)
            tl.store(mixed_ptr + offset, value.to(mixed_ptr.dtype.element_ty), mask=inside)


@triton.jit
def heads_backward(
    grad_q_ptr, grad_k_ptr, grad_v_ptr, qkv_ptr, embed_ptr, mix_ptr, cos_ptr, sin_ptr, scale_ptr, grad_qkv_ptr,
    grad_embed_ptr, grad_mix_ptr, rows, sequence, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr,
    PAIRS: tl.constexpr, MIXED: tl.constexpr, EMBED: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """The gradient of one head of the joined projection. Each program leaves its part of the mixing scalars' gradient
    in its row of `grad_mix` (programs, 2), to be summed in a fixed order."""
    NORMED: tl.constexpr = HEADS + KV_HEADS
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    row = tokens[:, None]
    head = tl.program_id(1)
    column = tl.arange(0, HALF)[None, :]
    inside = (row < rows) & (column < HALF)  # always true, for the shape
    joined = row * ((NORMED + KV_HEADS) * 2 * HALF) + head * (2 * HALF) + column
    if head < NORMED:
        if head < HEADS:
            given = grad_q_ptr + row * (HEADS * 2 * HALF) + head * (2 * HALF) + column
        else:
            given = grad_k_ptr + row * (KV_HEADS * 2 * HALF) + (head - HEADS) * (2 * HALF) + column
        da = tl.load(given, mask=inside, other=0.0).to(tl.float32)
        db = tl.load(given + HALF, mask=inside, other=0.0).to(tl.float32)
        a = tl.load(qkv_ptr + joined, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(qkv_ptr + joined + HALF, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(scale_ptr + tokens * NORMED + head, mask=tokens < rows, other=0.0)
        cos, sin = load_angles(cos_ptr, sin_ptr, row % sequence, column, inside, PAIRS)
        grad_a, grad_b = raw_gradient(da, db, a, b, scale, cos, sin, HALF)
    else:
        offset = row * (KV_HEADS * 2 * HALF) + (head - NORMED) * (2 * HALF) + column
        grad_a = tl.load(grad_v_ptr + offset, mask=inside, other=0.0).to(tl.float32)
        grad_b = tl.load(grad_v_ptr + offset + HALF, mask=inside, other=0.0).to(tl.float32)
        part = (tl.program_id(0) * KV_HEADS + head - NORMED) * 2
        if EMBED:
            share = tl.load(mix_ptr + 1).to(tl.float32)
            embed_a = tl.load(embed_ptr + offset, mask=inside, other=0.0).to(tl.float32)
            embed_b = tl.load(embed_ptr + offset + HALF, mask=inside, other=0.0).to(tl.float32)
            tl.store(grad_mix_ptr + part + 1, tl.sum(grad_a * embed_a + grad_b * embed_b))
            tl.store(grad_embed_ptr + offset, (share * grad_a).to(grad_embed_ptr.dtype.element_ty), mask=inside)
            tl.store(grad_embed_ptr + offset + HALF, (share * grad_b).to(grad_embed_ptr.dtype.element_ty), mask=inside)
        if MIXED:
            raw_a = tl.load(qkv_ptr + joined, mask=inside, other=0.0).to(tl.float32)
            raw_b = tl.load(qkv_ptr + joined + HALF, mask=inside, other=0.0).to(tl.float32)
            tl.store(grad_mix_ptr + part, tl.sum(grad_a * raw_a + grad_b * raw_b))
            raw_share = tl.load(mix_ptr).to(tl.float32)
            grad_a *= raw_share
            grad_b *= raw_share
    tl.store(grad_qkv_ptr + joined, grad_a.to(grad_qkv_ptr.dtype.element_ty), mask=inside)
    tl.store(grad_qkv_ptr + joined + HALF, grad_b.to(grad_qkv_ptr.dtype.element_ty), mask=inside)


def empty_heads(x: Tensor, mix: Tensor | None, heads: int, kv_heads: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Empty tensors of the shapes that `make_heads` gives."""
    rows, normed = x.size(0), heads + kv_heads
    mixed = x.new_empty(0) if mix is None else x.new_empty(rows, kv_heads, width)
    return x.new_empty(rows, normed + kv_heads, width), mixed, x.new_empty(rows, normed, dtype=torch.float32)


def _constants(cos: Tensor, value_embed: Tensor | None, kv_heads: int, width: int) -> dict[str, Any]:
    """What both kernels are compiled for."""
    sizes = {"KV_HEADS": kv_heads, "HALF": width // 2, "PAIRS": cos.size(1), "TOKENS": TOKENS}
    return {**sizes, "EMBED": value_embed is not None, "num_warps": WARPS}


@torch.library.custom_op("paceline::heads", mutates_args=())
def make_heads(
    x: Tensor, weight: Tensor, value_embed: Tensor | None, mix: Tensor | None, cos: Tensor, sin: Tensor, eps: float,
    heads: int, kv_heads: int, width: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Queries and keys, ready, and values as they were projected, (N, H + 2 H_kv, D); values after they were mixed,
    (N, H_kv, D), empty where they were not; scales of the norms, (N, H + H_kv) fp32."""
    qkv, mixed, norm = empty_heads(x, mix, heads, kv_heads, width)
    torch.mm(x, weight.T, out=qkv.flatten(1))
    given = (norm if value_embed is None else value_embed, norm if mix is None else mix, cos, sin)
    numbers, constants = (x.size(0), cos.size(0), eps), _constants(cos, value_embed, kv_heads, width)
    grid = (triton.cdiv(x.size(0), TOKENS), 1 if mix is None else 2)
    heads_forward[grid](qkv, *given, mixed, norm, *numbers, NORMED=heads + kv_heads, **constants)
    return qkv, mixed, norm


@make_heads.register_fake
def _(x, weight, value_embed, mix, cos, sin, eps, heads, kv_heads, width):
    return empty_heads(x, mix, heads, kv_heads, width)


@torch.library.custom_op("paceline::heads_backward", mutates_args=())
def heads_gradients(
    grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, x: Tensor, weight: Tensor, value_embed: Tensor | None,
    mix: Tensor | None, cos: Tensor, sin: Tensor, qkv: Tensor, norm: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x, weight, value_embed and mix; the last two empty where there is none."""
    rows, heads, width = grad_q.shape
    kv_heads, programs = grad_v.size(1), triton.cdiv(rows, TOKENS)
    grad_qkv, grad_embed = torch.empty_like(qkv), empty_like(value_embed, x)
    parts = x.new_zeros(programs * kv_heads, 2, dtype=torch.float32)
    grads = (grad.contiguous() for grad in (grad_q, grad_k, grad_v))
    given = (qkv, qkv if value_embed is None else value_embed, norm if mix is None else mix, cos, sin, norm)
    switches = {"HEADS": heads, "MIXED": mix is not None, **_constants(cos, value_embed, kv_heads, width)}
    grid = (programs, heads + 2 * kv_heads)
    heads_backward[grid](*grads, *given, grad_qkv, grad_embed, parts, rows, cos.size(0), **switches)
    return through_projection(grad_qkv, grad_embed, parts, x, weight, mix, kv_heads)


def through_projection(
    grad_qkv: Tensor, grad_embed: Tensor, parts: Tensor, x: Tensor, weight: Tensor, mix: Tensor | None, kv_heads: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, weight, value_embed and mix. That of weight is one product each for queries, keys and values:
    1.31 ms instead of 1.41 for 262,144 tokens of record 18 on an H200, probably because the library's pieces of a
    square fill the multiprocessors more evenly."""
    sizes = [grad_qkv.size(1) - 2 * kv_heads, kv_heads, kv_heads]
    grad = x.new_empty(grad_qkv.size(1), grad_qkv.size(2), x.size(1))
    for part, out in zip(grad_qkv.split(sizes, 1), grad.split(sizes), strict=True):
        torch.mm(part.flatten(1).T, x, out=out.flatten(0, 1))
    grad_mix = x.new_empty(0) if mix is None else parts.sum(0).to(mix.dtype)
    return grad_qkv.flatten(1) @ weight, grad.flatten(0, 1), grad_embed, grad_mix


def empty_like(tensor: Tensor | None, x: Tensor) -> Tensor:
    """For the gradient of an input; of no elements where there is none."""
    return x.new_empty(0) if tensor is None else torch.empty_like(tensor)


@heads_gradients.register_fake
def _(grad_q, grad_k, grad_v, *given):
    return tuple(empty_like(tensor, given[0]) for tensor in given[:4])


def _keep(ctx, inputs, output):
    *tensors, _, ctx.heads, ctx.kv_heads, _ = inputs
    qkv, _, norm = output
    ctx.save_for_backward(*tensors, qkv, norm)


def _backward(ctx, grad_qkv, grad_mixed, _norm):
    saved = ctx.saved_tensors  # read once: recomputation gives each tensor once
    given = saved[:4]
    grad_q, grad_k, grad_raw_v = grad_qkv.split([ctx.heads, ctx.kv_heads, ctx.kv_heads], 1)
    grads = heads_gradients(grad_q, grad_k, grad_raw_v if given[3] is None else grad_mixed, *saved)
    return *of_given(grads, given), *(None,) * 6


def of_given(grads: tuple[Tensor, ...], given: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """None for an input that there is not."""
    return tuple(None if tensor is None else grad for grad, tensor in zip(grads, given, strict=True))


make_heads.register_autograd(_backward, setup_context=_keep)
