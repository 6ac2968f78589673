"""From the stream to the heads of attention: projections, norm, rotary, value mix. Plain twin: `model.attention`.

Three projections are one product, and its ending normalises and turns queries and keys and mixes the values, so that
raw queries and keys never exist: y = turn(x s) with s = (mean x² + ε)^-½ is kept with s, and from both the gradient
follows: dx = s·turn⁻¹(dy - y·mean(dy·y)), because a rotation keeps inner products. Raw values are kept, which the
gradient of the mixing scalars needs. Backward, all parts write into one gradient of the joined projection: nothing is
concatenated. Shapes that the product's tiles cannot hold take the library's product and a kernel for the rest.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

TOKENS, WARPS = 16, 4
"""Tokens of one program of the elementwise kernels, which handles one head of them."""


@dataclass(frozen=True)
class Tiles:
    """How the product is cut: tiles of `m` tokens and two heads. One head, two programs a multiprocessor: no faster."""

    m: int = 128
    k: int = 64
    group: int = 16
    stages: int = 3
    warps: int = 8


TILES = Tiles()


@dataclass(frozen=True)
class Shape:
    """Heads of queries, heads of keys and of values, and their width."""

    heads: int
    kv_heads: int
    width: int

    @property
    def whole_tiles(self) -> bool:
        """Whether the product's tiles are cut at the borders of queries, keys and values."""
        return self.width == 128 and self.heads % 2 == 0 and self.kv_heads % 2 == 0


def heads_fused(
    x: Tensor,
    weight: Tensor,
    extra: Tensor | None,
    mix: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    shape: tuple[int, int, int],
) -> tuple[Tensor, Tensor, Tensor]:
    """q (N, H, D), k and v (N, H_kv, D) of x (N, width) by weight ((H + 2 H_kv) D, width), `shape` being (H, H_kv, D).

    q and k are RMS-normalised with `eps`, then their first P pairs turned by cos and sin (T, P), N a multiple of T.
    v ← mix[0]·v + mix[1]·extra; without `extra` (N, H_kv, D) only the first term, without `mix` (2,) v itself."""
    q, k, v, _, _ = _heads(x, weight, extra, mix, cos, sin, eps, *shape)
    return q, k, v


@triton.jit
def turn_back(a, b, cos, sin):
    """The inverse of the rotation (a cos + b sin, b cos - a sin)."""
    return a * cos - b * sin, a * sin + b * cos


@triton.jit
def load_angles(cos_ptr, sin_ptr, position, column, inside, PAIRS: tl.constexpr):
    """Cosines and sines (positions, columns): those of a pair that does not turn are 1 and 0."""
    turns = inside & (column < PAIRS)
    angle = position * PAIRS + column
    cos = tl.load(cos_ptr + angle, mask=turns, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + angle, mask=turns, other=0.0).to(tl.float32)
    return cos, sin


@triton.jit
def halves(x, ROWS: tl.constexpr, HALF: tl.constexpr):
    """(ROWS, 2 HALF) cut into its two halves of columns: a pair is an element of either."""
    return tl.split(tl.reshape(x, (ROWS, 2, HALF)).permute(0, 2, 1))


@triton.jit
def raw_gradient(grad_a, grad_b, a, b, scale, cos, sin, HALF: tl.constexpr):
    """The gradient of x, given that of y = turn(x s), y itself and s (rows,): s·turn⁻¹(dy - y·mean(dy·y))."""
    along = ((tl.sum(grad_a * a, 1) + tl.sum(grad_b * b, 1)) * (1.0 / (2 * HALF)))[:, None]
    back_a, back_b = turn_back(grad_a - a * along, grad_b - b * along, cos, sin)
    return back_a * scale[:, None], back_b * scale[:, None]


@triton.jit
def heads_ending(
    head,  # of the joined projection
    product,  # (tokens, width) fp32
    m,
    q_desc,
    k_desc,
    v_desc,
    own_desc,
    extra_desc,
    mix_ptr,
    cos_ptr,
    sin_ptr,
    scale_ptr,
    rows,
    sequence,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
    MIXED: tl.constexpr,
    EXTRA: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Finish one head of a tile and store it."""
    a, b = halves(product, BLOCK_M, HALF)
    if head < HEADS + KV_HEADS:
        row = m + tl.arange(0, BLOCK_M)
        column = tl.arange(0, HALF)[None, :]
        inside = (row < rows)[:, None]
        scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) * (1.0 / (2 * HALF)) + eps)
        tl.store(scale_ptr + row.to(tl.int64) * (HEADS + KV_HEADS) + head, scale, mask=row < rows)
        cos, sin = load_angles(cos_ptr, sin_ptr, (row % sequence)[:, None], column, inside, PAIRS)
        turned_a = (a * cos + b * sin) * scale[:, None]
        turned_b = (b * cos - a * sin) * scale[:, None]
        if head < HEADS:
            q_desc.store([m, head * 2 * HALF], turned_a.to(q_desc.dtype))
            q_desc.store([m, head * 2 * HALF + HALF], turned_b.to(q_desc.dtype))
        else:
            k_desc.store([m, (head - HEADS) * 2 * HALF], turned_a.to(k_desc.dtype))
            k_desc.store([m, (head - HEADS) * 2 * HALF + HALF], turned_b.to(k_desc.dtype))
    else:
        first = (head - HEADS - KV_HEADS) * 2 * HALF
        if MIXED:
            own_desc.store([m, first], a.to(own_desc.dtype))
            own_desc.store([m, first + HALF], b.to(own_desc.dtype))
            own = tl.load(mix_ptr).to(tl.float32)
            a *= own
            b *= own
        if EXTRA:
            share = tl.load(mix_ptr + 1).to(tl.float32)
            a += share * extra_desc.load([m, first]).to(tl.float32)
            b += share * extra_desc.load([m, first + HALF]).to(tl.float32)
        v_desc.store([m, first], a.to(v_desc.dtype))
        v_desc.store([m, first + HALF], b.to(v_desc.dtype))


@triton.jit
def heads_product(
    x_desc,
    weight_desc,
    q_desc,
    k_desc,
    v_desc,
    own_desc,
    extra_desc,
    mix_ptr,
    cos_ptr,
    sin_ptr,
    scale_ptr,
    rows,
    depth,
    sequence,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
    MIXED: tl.constexpr,
    EXTRA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """All heads of all rows, in tiles of two heads."""
    row_tiles = tl.cdiv(rows, BLOCK_M)
    column_tiles: tl.constexpr = (HEADS + 2 * KV_HEADS) // 2
    for tile in range(tl.program_id(0), row_tiles * column_tiles, PROGRAMS):  # Triton cannot flatten over branches
        first = (tile // (GROUP_M * column_tiles)) * GROUP_M
        height = min(row_tiles - first, GROUP_M)
        m = (first + (tile % (GROUP_M * column_tiles)) % height) * BLOCK_M
        head = ((tile % (GROUP_M * column_tiles)) // height) * 2
        product = tl.zeros((BLOCK_M, 4 * HALF), tl.float32)
        for k in range(0, depth, BLOCK_K):
            product = tl.dot(x_desc.load([m, k]), weight_desc.load([head * 2 * HALF, k]).T, product)
        left, right = halves(product, BLOCK_M, 2 * HALF)
        heads_ending(
            head, left, m, q_desc, k_desc, v_desc, own_desc, extra_desc, mix_ptr, cos_ptr, sin_ptr, scale_ptr,
            rows, sequence, eps, HEADS, KV_HEADS, HALF, PAIRS, MIXED, EXTRA, BLOCK_M,
        )  # fmt: skip
        heads_ending(
            head + 1, right, m, q_desc, k_desc, v_desc, own_desc, extra_desc, mix_ptr, cos_ptr, sin_ptr, scale_ptr,
            rows, sequence, eps, HEADS, KV_HEADS, HALF, PAIRS, MIXED, EXTRA, BLOCK_M,
        )  # fmt: skip


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
    own_ptr,
    scale_ptr,
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
    """`heads_ending` for a product that lies in memory: one head of TOKENS rows."""
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    row = tokens[:, None]
    head = tl.program_id(1)
    column = tl.arange(0, HALF)[None, :]
    inside = (row < rows) & (column < HALF)
    source = qkv_ptr + row * ((HEADS + 2 * KV_HEADS) * 2 * HALF) + head * (2 * HALF) + column
    a = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    if head < HEADS + KV_HEADS:
        scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) * (1.0 / (2 * HALF)) + eps)
        tl.store(scale_ptr + tokens * (HEADS + KV_HEADS) + head, scale, mask=tokens < rows)
        cos, sin = load_angles(cos_ptr, sin_ptr, row % sequence, column, inside, PAIRS)
        turned_a = (a * cos + b * sin) * scale[:, None]
        turned_b = (b * cos - a * sin) * scale[:, None]
        if head < HEADS:
            place = q_ptr + row * (HEADS * 2 * HALF) + head * (2 * HALF) + column
        else:
            place = k_ptr + row * (KV_HEADS * 2 * HALF) + (head - HEADS) * (2 * HALF) + column
        tl.store(place, turned_a.to(q_ptr.dtype.element_ty), mask=inside)
        tl.store(place + HALF, turned_b.to(q_ptr.dtype.element_ty), mask=inside)
    else:
        offset = row * (KV_HEADS * 2 * HALF) + (head - HEADS - KV_HEADS) * (2 * HALF) + column
        if MIXED:
            tl.store(own_ptr + offset, a.to(own_ptr.dtype.element_ty), mask=inside)
            tl.store(own_ptr + offset + HALF, b.to(own_ptr.dtype.element_ty), mask=inside)
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
    q_ptr,
    k_ptr,
    own_ptr,
    extra_ptr,
    mix_ptr,
    cos_ptr,
    sin_ptr,
    scale_ptr,
    grad_qkv_ptr,
    grad_extra_ptr,
    grad_mix_ptr,
    rows,
    sequence,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
    MIXED: tl.constexpr,
    EXTRA: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """The gradient of one head of the joined projection. Each program leaves its part of the mixing scalars' gradient
    in its row of `grad_mix` (programs, 2), to be summed in a fixed order."""
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    row = tokens[:, None]
    head = tl.program_id(1)
    column = tl.arange(0, HALF)[None, :]
    inside = (row < rows) & (column < HALF)
    if head < HEADS + KV_HEADS:
        if head < HEADS:
            offset = row * (HEADS * 2 * HALF) + head * (2 * HALF) + column
            given, kept = grad_q_ptr + offset, q_ptr + offset
        else:
            offset = row * (KV_HEADS * 2 * HALF) + (head - HEADS) * (2 * HALF) + column
            given, kept = grad_k_ptr + offset, k_ptr + offset
        da = tl.load(given, mask=inside, other=0.0).to(tl.float32)
        db = tl.load(given + HALF, mask=inside, other=0.0).to(tl.float32)
        a = tl.load(kept, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(kept + HALF, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(scale_ptr + tokens * (HEADS + KV_HEADS) + head, mask=tokens < rows, other=0.0)
        cos, sin = load_angles(cos_ptr, sin_ptr, row % sequence, column, inside, PAIRS)
        grad_a, grad_b = raw_gradient(da, db, a, b, scale, cos, sin, HALF)
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
            own_a = tl.load(own_ptr + offset, mask=inside, other=0.0).to(tl.float32)
            own_b = tl.load(own_ptr + offset + HALF, mask=inside, other=0.0).to(tl.float32)
            tl.store(grad_mix_ptr + part, tl.sum(grad_a * own_a + grad_b * own_b))
            own = tl.load(mix_ptr).to(tl.float32)
            grad_a *= own
            grad_b *= own
    place = grad_qkv_ptr + row * ((HEADS + 2 * KV_HEADS) * 2 * HALF) + head * (2 * HALF) + column
    tl.store(place, grad_a.to(grad_qkv_ptr.dtype.element_ty), mask=inside)
    tl.store(place + HALF, grad_b.to(grad_qkv_ptr.dtype.element_ty), mask=inside)


@dataclass(frozen=True)
class Made:
    """What the forward pass leaves: heads by row, raw values if they were mixed, scales of the norms."""

    q: Tensor
    k: Tensor
    v: Tensor
    own: Tensor
    norm: Tensor


def _empty(x: Tensor, shape: Shape, *, mixed: bool) -> Made:
    rows, kv = x.size(0), (x.size(0), shape.kv_heads, shape.width)
    return Made(
        x.new_empty(rows, shape.heads, shape.width),
        x.new_empty(kv),
        x.new_empty(kv),
        x.new_empty(kv) if mixed else x.new_empty(0),
        x.new_empty(rows, shape.heads + shape.kv_heads, dtype=torch.float32),
    )


def _switches(shape: Shape, cos: Tensor, extra: Tensor | None, mix: Tensor | None) -> dict[str, int | bool]:
    """The constants that all kernels take."""
    return {
        "HEADS": shape.heads,
        "KV_HEADS": shape.kv_heads,
        "HALF": shape.width // 2,
        "PAIRS": cos.size(1),
        "MIXED": mix is not None,
        "EXTRA": extra is not None,
    }


def launch_product(
    made: Made, x: Tensor, weight: Tensor, extra: Tensor | None, mix: Tensor | None, cos: Tensor, sin: Tensor,
    eps: float, shape: Shape,
) -> None:  # fmt: skip
    """Fill `made` by the product whose ending makes the heads."""
    tiles, half = TILES, [TILES.m, shape.width // 2]

    def by_row(tensor: Tensor) -> TensorDescriptor:
        return TensorDescriptor.from_tensor(tensor.view(tensor.size(0), -1), half)

    processors = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 4
    heads_product[(processors,)](
        TensorDescriptor.from_tensor(x, [tiles.m, tiles.k]),
        TensorDescriptor.from_tensor(weight, [2 * shape.width, tiles.k]),
        by_row(made.q),
        by_row(made.k),
        by_row(made.v),
        by_row(made.v if mix is None else made.own),
        by_row(made.v if extra is None else extra),
        made.norm if mix is None else mix,
        cos,
        sin,
        made.norm,
        x.size(0),
        x.size(1),
        cos.size(0),
        eps,
        **_switches(shape, cos, extra, mix),
        BLOCK_M=tiles.m,
        BLOCK_K=tiles.k,
        GROUP_M=tiles.group,
        PROGRAMS=processors,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )


def launch_forward(
    made: Made, qkv: Tensor, extra: Tensor | None, mix: Tensor | None, cos: Tensor, sin: Tensor, eps: float,
    shape: Shape,
) -> None:  # fmt: skip
    """Fill `made` from a joined projection that lies in memory."""
    rows = qkv.size(0)
    heads_forward[(triton.cdiv(rows, TOKENS), shape.heads + 2 * shape.kv_heads)](
        qkv,
        qkv if extra is None else extra,
        made.norm if mix is None else mix,
        cos,
        sin,
        made.q,
        made.k,
        made.v,
        made.v if mix is None else made.own,
        made.norm,
        rows,
        cos.size(0),
        eps,
        **_switches(shape, cos, extra, mix),
        TOKENS=TOKENS,
        num_warps=WARPS,
    )


def make(
    x: Tensor, weight: Tensor, extra: Tensor | None, mix: Tensor | None, cos: Tensor, sin: Tensor, eps: float,
    heads: int, kv_heads: int, width: int,
) -> Made:  # fmt: skip
    """The heads, and what the backward pass needs, by the product's ending if its tiles can hold them."""
    shape = Shape(heads, kv_heads, width)
    made = _empty(x, shape, mixed=mix is not None)
    if shape.whole_tiles:
        launch_product(made, x, weight, extra, mix, cos, sin, eps, shape)
    else:
        launch_forward(made, x @ weight.T, extra, mix, cos, sin, eps, shape)
    return made


@torch.library.custom_op("paceline::heads", mutates_args=())
def _heads(
    x: Tensor,
    weight: Tensor,
    extra: Tensor | None,
    mix: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    heads: int,
    kv_heads: int,
    width: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, and for the backward pass raw values (empty where they are not mixed) and scales."""
    made = make(x, weight, extra, mix, cos, sin, eps, heads, kv_heads, width)
    return made.q, made.k, made.v, made.own, made.norm


@_heads.register_fake
def _(x, weight, extra, mix, cos, sin, eps, heads, kv_heads, width):
    made = _empty(x, Shape(heads, kv_heads, width), mixed=mix is not None)
    return made.q, made.k, made.v, made.own, made.norm


@torch.library.custom_op("paceline::heads_backward", mutates_args=())
def _heads_backward(
    grad_q: Tensor,
    grad_k: Tensor,
    grad_v: Tensor,
    x: Tensor,
    weight: Tensor,
    extra: Tensor | None,
    mix: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    q: Tensor,
    k: Tensor,
    own: Tensor,
    scale: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, weight, extra and mix; the last two empty where there is none."""
    rows, heads, width = grad_q.shape
    shape = Shape(heads, grad_k.size(1), width)
    programs = triton.cdiv(rows, TOKENS)
    grad_qkv = x.new_empty(rows, weight.size(0))
    grad_extra = x.new_empty(0) if extra is None else torch.empty_like(extra)
    parts = x.new_zeros(programs * shape.kv_heads, 2, dtype=torch.float32)
    heads_backward[(programs, heads + 2 * shape.kv_heads)](
        grad_q.contiguous(),
        grad_k.contiguous(),
        grad_v.contiguous(),
        q,
        k,
        own,
        q if extra is None else extra,
        scale if mix is None else mix,
        cos,
        sin,
        scale,
        grad_qkv,
        grad_extra,
        parts,
        rows,
        cos.size(0),
        **_switches(shape, cos, extra, mix),
        TOKENS=TOKENS,
        num_warps=WARPS,
    )
    grad_mix = x.new_empty(0) if mix is None else parts.sum(0).to(mix.dtype)
    return grad_qkv @ weight, grad_qkv.T @ x, grad_extra, grad_mix


@_heads_backward.register_fake
def _(grad_q, grad_k, grad_v, x, weight, extra, mix, cos, sin, q, k, own, scale):
    grads = (x.new_empty(0) if tensor is None else torch.empty_like(tensor) for tensor in (extra, mix))
    return torch.empty_like(x), torch.empty_like(weight), *grads


def _keep(ctx, inputs, output):
    x, weight, extra, mix, cos, sin, *_ = inputs
    q, k, _, own, scale = output
    ctx.has_extra, ctx.has_mix = extra is not None, mix is not None
    optional = (tensor for tensor in (extra, mix) if tensor is not None)
    ctx.save_for_backward(x, weight, cos, sin, q, k, own, scale, *optional)


def _backward(ctx, grad_q, grad_k, grad_v, _own, _scale):
    x, weight, cos, sin, q, k, own, scale, *optional = ctx.saved_tensors
    extra = optional.pop(0) if ctx.has_extra else None
    mix = optional.pop(0) if ctx.has_mix else None
    grad_x, grad_weight, grad_extra, grad_mix = _heads_backward(
        grad_q, grad_k, grad_v, x, weight, extra, mix, cos, sin, q, k, own, scale
    )
    optional_grads = (grad_extra if ctx.has_extra else None, grad_mix if ctx.has_mix else None)
    return grad_x, grad_weight, *optional_grads, *(None,) * 6


_heads.register_autograd(_backward, setup_context=_keep)
