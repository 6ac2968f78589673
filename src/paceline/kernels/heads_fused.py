"""From a joined projection to the heads that attention takes, in one pass over memory. Plain twin: `model.attention`.

Queries and keys are normalised and turned, values are mixed with their table's rows; backward, all three write into
one gradient of the joined projection, so that nothing is concatenated. A GPU is bound by memory here: 3.4 bytes of
every 4 that the compiler's kernels moved were needed, and they took twice the time of a copy (docs/experiments.md).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

TOKENS = 16
"""Tokens of one program, which handles one head of them."""
WARPS = 4


def heads_fused(
    qkv: Tensor,
    extra: Tensor | None,
    mix: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    shape: tuple[int, int, int],
) -> tuple[Tensor, Tensor, Tensor]:
    """q (N, H, D), k and v (N, H_kv, D) from qkv (N, (H + 2 H_kv) D), `shape` being (H, H_kv, D).

    q and k are RMS-normalised with `eps`, then their first P pairs turned by cos and sin (T, P), N a multiple of T.
    v ← mix[0]·v + mix[1]·extra; without `extra` (N, H_kv, D) only the first term, without `mix` (2,) v itself."""
    q, k, v = _heads(qkv, extra, mix, cos, sin, eps, *shape)
    return q, k, v


@triton.jit
def heads_forward(
    qkv_ptr,
    extra_ptr,
    mix_ptr,
    cos_ptr,
    sin_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    rows,
    sequence,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
    MIXED: tl.constexpr,
    EXTRA: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """One head of the joined projection, for `TOKENS` tokens. Both halves of a head are loaded apart: a pair is one
    element of each."""
    row = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None]
    head = tl.program_id(1)
    column = tl.arange(0, HALF)[None, :]
    inside = (row < rows) & (column < HALF)
    width: tl.constexpr = (HEADS + 2 * KV_HEADS) * 2 * HALF
    source = qkv_ptr + row * width + head * (2 * HALF) + column
    a = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    if head < HEADS + KV_HEADS:
        scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) * (1.0 / (2 * HALF)) + eps)[:, None]
        turns = inside & (column < PAIRS)
        angle = (row % sequence) * PAIRS + column
        cos = tl.load(cos_ptr + angle, mask=turns, other=1.0).to(tl.float32)
        sin = tl.load(sin_ptr + angle, mask=turns, other=0.0).to(tl.float32)
        turned_a = (a * cos + b * sin) * scale
        turned_b = (b * cos - a * sin) * scale
        if head < HEADS:
            place = q_ptr + row * (HEADS * 2 * HALF) + head * (2 * HALF) + column
        else:
            place = k_ptr + row * (KV_HEADS * 2 * HALF) + (head - HEADS) * (2 * HALF) + column
        tl.store(place, turned_a.to(q_ptr.dtype.element_ty), mask=inside)
        tl.store(place + HALF, turned_b.to(q_ptr.dtype.element_ty), mask=inside)
    else:
        offset = row * (KV_HEADS * 2 * HALF) + (head - HEADS - KV_HEADS) * (2 * HALF) + column
        if MIXED:
            own = tl.load(mix_ptr).to(tl.float32)
            a *= own
            b *= own
        if EXTRA:
            share = tl.load(mix_ptr + 1).to(tl.float32)
            a += share * tl.load(extra_ptr + offset, mask=inside, other=0.0).to(tl.float32)
            b += share * tl.load(extra_ptr + offset + HALF, mask=inside, other=0.0).to(tl.float32)
        tl.store(v_ptr + offset, a.to(v_ptr.dtype.element_ty), mask=inside)
        tl.store(v_ptr + offset + HALF, b.to(v_ptr.dtype.element_ty), mask=inside)


@triton.jit
def heads_backward(
    grad_q_ptr,
    grad_k_ptr,
    grad_v_ptr,
    qkv_ptr,
    extra_ptr,
    mix_ptr,
    cos_ptr,
    sin_ptr,
    grad_qkv_ptr,
    grad_extra_ptr,
    grad_mix_ptr,
    rows,
    sequence,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
    MIXED: tl.constexpr,
    EXTRA: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """The gradient of one head of the joined projection. For y = turn(x s), s = (mean x² + ε)^-½ and d the gradient
    turned back: dx = s d - x s³ mean(d x). Each program leaves its part of the mixing scalars' gradient in its row of
    `grad_mix` (programs, 2), to be summed in a fixed order."""
    row = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None]
    head = tl.program_id(1)
    column = tl.arange(0, HALF)[None, :]
    inside = (row < rows) & (column < HALF)
    width: tl.constexpr = (HEADS + 2 * KV_HEADS) * 2 * HALF
    source = row * width + head * (2 * HALF) + column
    a = tl.load(qkv_ptr + source, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(qkv_ptr + source + HALF, mask=inside, other=0.0).to(tl.float32)
    if head < HEADS + KV_HEADS:
        if head < HEADS:
            given = grad_q_ptr + row * (HEADS * 2 * HALF) + head * (2 * HALF) + column
        else:
            given = grad_k_ptr + row * (KV_HEADS * 2 * HALF) + (head - HEADS) * (2 * HALF) + column
        da = tl.load(given, mask=inside, other=0.0).to(tl.float32)
        db = tl.load(given + HALF, mask=inside, other=0.0).to(tl.float32)
        turns = inside & (column < PAIRS)
        angle = (row % sequence) * PAIRS + column
        cos = tl.load(cos_ptr + angle, mask=turns, other=1.0).to(tl.float32)
        sin = tl.load(sin_ptr + angle, mask=turns, other=0.0).to(tl.float32)
        back_a = da * cos - db * sin
        back_b = da * sin + db * cos
        scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) * (1.0 / (2 * HALF)) + eps)[:, None]
        along = ((tl.sum(back_a * a, 1) + tl.sum(back_b * b, 1)) * (1.0 / (2 * HALF)))[:, None] * scale * scale
        grad_a = scale * (back_a - a * along)
        grad_b = scale * (back_b - b * along)
    else:
        offset = row * (KV_HEADS * 2 * HALF) + (head - HEADS - KV_HEADS) * (2 * HALF) + column
        grad_a = tl.load(grad_v_ptr + offset, mask=inside, other=0.0).to(tl.float32)
        grad_b = tl.load(grad_v_ptr + offset + HALF, mask=inside, other=0.0).to(tl.float32)
        part = (tl.program_id(0) * KV_HEADS + head - HEADS - KV_HEADS) * 2
        if EXTRA:
            share = tl.load(mix_ptr + 1).to(tl.float32)
            extra_a = tl.load(extra_ptr + offset, mask=inside, other=0.0).to(tl.float32)
            extra_b = tl.load(extra_ptr + offset + HALF, mask=inside, other=0.0).to(tl.float32)
            tl.store(grad_mix_ptr + part + 1, tl.sum(grad_a * extra_a + grad_b * extra_b))
            tl.store(grad_extra_ptr + offset, (share * grad_a).to(grad_extra_ptr.dtype.element_ty), mask=inside)
            tl.store(grad_extra_ptr + offset + HALF, (share * grad_b).to(grad_extra_ptr.dtype.element_ty), mask=inside)
        if MIXED:
            own = tl.load(mix_ptr).to(tl.float32)
            tl.store(grad_mix_ptr + part, tl.sum(grad_a * a + grad_b * b))
            grad_a *= own
            grad_b *= own
    tl.store(grad_qkv_ptr + source, grad_a.to(grad_qkv_ptr.dtype.element_ty), mask=inside)
    tl.store(grad_qkv_ptr + source + HALF, grad_b.to(grad_qkv_ptr.dtype.element_ty), mask=inside)


@torch.library.custom_op("paceline::heads", mutates_args=())
def _heads(
    qkv: Tensor,
    extra: Tensor | None,
    mix: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    heads: int,
    kv_heads: int,
    head_dim: int,
) -> tuple[Tensor, Tensor, Tensor]:
    rows = qkv.size(0)
    q = qkv.new_empty(rows, heads, head_dim)
    k, v = (qkv.new_empty(rows, kv_heads, head_dim) for _ in range(2))
    heads_forward[(triton.cdiv(rows, TOKENS), heads + 2 * kv_heads)](
        qkv,
        qkv if extra is None else extra,
        qkv if mix is None else mix,
        cos,
        sin,
        q,
        k,
        v,
        rows,
        cos.size(0),
        eps,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HALF=head_dim // 2,
        PAIRS=cos.size(1),
        MIXED=mix is not None,
        EXTRA=extra is not None,
        TOKENS=TOKENS,
        num_warps=WARPS,
    )
    return q, k, v


@_heads.register_fake
def _(qkv, extra, mix, cos, sin, eps, heads, kv_heads, head_dim):
    kv = (qkv.size(0), kv_heads, head_dim)
    return qkv.new_empty(qkv.size(0), heads, head_dim), qkv.new_empty(kv), qkv.new_empty(kv)


@torch.library.custom_op("paceline::heads_backward", mutates_args=())
def _heads_backward(
    grad_q: Tensor,
    grad_k: Tensor,
    grad_v: Tensor,
    qkv: Tensor,
    extra: Tensor | None,
    mix: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of qkv, extra and mix; the last two empty where there is none."""
    rows, heads, head_dim = grad_q.shape
    kv_heads = grad_k.size(1)
    programs = triton.cdiv(rows, TOKENS)
    grad_qkv = torch.empty_like(qkv)
    grad_extra = qkv.new_empty(0) if extra is None else torch.empty_like(extra)
    parts = qkv.new_zeros(programs * kv_heads, 2, dtype=torch.float32)
    heads_backward[(programs, heads + 2 * kv_heads)](
        grad_q.contiguous(),
        grad_k.contiguous(),
        grad_v.contiguous(),
        qkv,
        qkv if extra is None else extra,
        qkv if mix is None else mix,
        cos,
        sin,
        grad_qkv,
        grad_extra,
        parts,
        rows,
        cos.size(0),
        eps,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HALF=head_dim // 2,
        PAIRS=cos.size(1),
        MIXED=mix is not None,
        EXTRA=extra is not None,
        TOKENS=TOKENS,
        num_warps=WARPS,
    )
    return grad_qkv, grad_extra, qkv.new_empty(0) if mix is None else parts.sum(0).to(mix.dtype)


@_heads_backward.register_fake
def _(grad_q, grad_k, grad_v, qkv, extra, mix, cos, sin, eps):
    grads = (qkv.new_empty(0) if tensor is None else torch.empty_like(tensor) for tensor in (extra, mix))
    return torch.empty_like(qkv), *grads


def _keep(ctx, inputs, output):
    qkv, extra, mix, cos, sin, ctx.eps, *_ = inputs
    ctx.has_extra, ctx.has_mix = extra is not None, mix is not None
    ctx.save_for_backward(qkv, *(tensor for tensor in (extra, mix) if tensor is not None), cos, sin)


def _backward(ctx, grad_q, grad_k, grad_v):
    qkv, *optional, cos, sin = ctx.saved_tensors
    extra = optional.pop(0) if ctx.has_extra else None
    mix = optional.pop(0) if ctx.has_mix else None
    grad_qkv, grad_extra, grad_mix = _heads_backward(grad_q, grad_k, grad_v, qkv, extra, mix, cos, sin, ctx.eps)
    return grad_qkv, grad_extra if ctx.has_extra else None, grad_mix if ctx.has_mix else None, *(None,) * 6


_heads.register_autograd(_backward, setup_context=_keep)
