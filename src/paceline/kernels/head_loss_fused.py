"""Head, cap, loss and their gradient in one go, for a GPU with Triton. The plain twin is `model.loss.head_loss`.

The logits z of a chunk of tokens are one product. The gradient of a row is its exponentials times the slope of the cap,
divided by their sum, and one less at the target. Where the copy engine can address the logits and a cap c bounds them,
no maximum is needed, and the product itself stores exp(c)·dc/dz and sums exp(c) (`gemm_pingpong`). The division is one
factor for a row, which the products that carry the gradient on apply. Elsewhere the logits are stored, and one kernel
takes the loss of each row and leaves the gradient in its place. No product is computed twice and no fp32 logits exist.
The gradient is taken in the forward pass, for a total with weight 1, and the backward pass only scales it: that is why
the loss is handed back as a total.
Tried and dropped: sums of exponentials in the ending of a product whose matrix units wait (docs/experiments.md).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.core.units import IGNORE_TARGET
from paceline.kernels.attention_ranges import LOWEST
from paceline.settings.backends import FUSED_CHUNK_TOKENS

BLOCK, WARPS = 8_192, 16
"""Logits that a program works on at a time. So large a program that a multiprocessor holds few: rows that are in work
at the same time, 100 kB each, should stay in the cache until they are read again (0.56 ms for 8,192 rows on an H200,
0.67 by 8 warps, 0.72 by 32)."""
TARGET_ROWS, TARGET_WARPS = 8, 8
"""Rows whose targets a program looks at: their sums lie in one sector (0.10 ms for 16,384 rows in any cut tried)."""
ADDRESS_BYTES = 16
"""What rows must be a multiple of for the copy engine."""
LOG2_E = tl.constexpr(1.4426950408889634)
Bounds = tuple[float | None, float]
"""Cap and shift of the logits."""
UNSHIFTED_CAP = 64.0
"""Up to this cap exp(logit) neither overflows nor vanishes in fp32, nor does a sum of them: no running maximum."""


def head_loss_fused(
    x: Tensor, weight: Tensor, targets: Tensor, cap: float | None, shift: float = 0.0, chunk_tokens: int | None = None
) -> Tensor:
    """Total loss, 0-D fp32, of normalised activations x (N, width) under head rows (V, width), both in the compute
    format; targets (N,). A target that does not count adds nothing."""
    chunk = chunk_tokens or FUSED_CHUNK_TOKENS
    total, *_ = _head_loss(x, weight, targets, cap, shift, torch.is_grad_enabled(), chunk)
    return total


@triton.jit
def head_loss_rows(
    logits_ptr, targets_ptr, losses_ptr, vocab, cap, lift, ignore, CAPPED: tl.constexpr, SHIFTED: tl.constexpr,
    WITH_GRADIENT: tl.constexpr, HARDWARE: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """One row of raw logits (row-contiguous, `vocab` columns): its loss, and in place of the logits the gradient.
    SHIFTED: the sum of exponentials needs a running maximum. All exponentials are in base 2. HARDWARE: tanh by the
    GPU's own instruction. What whole blocks leave over is a block of TAIL, masked."""
    row = tl.program_id(0).to(tl.int64)  # rows x columns passes 2^31
    logits_ptr += row * vocab
    target = tl.load(targets_ptr + row)
    counted = target != ignore
    gain = LOG2_E * (cap if CAPPED else 1.0)
    turn = 1.0 / cap
    columns = tl.arange(0, BLOCK)
    whole = vocab // BLOCK * BLOCK
    last = whole + tl.arange(0, TAIL)
    inside = last < vocab
    rest = tl.load(logits_ptr + last, mask=inside, other=0.0).to(tl.float32)
    log_sum = log_sum_of_row(logits_ptr, whole, rest, inside, turn, lift, gain, CAPPED, SHIFTED, HARDWARE, BLOCK, TAIL)
    chosen = tl.load(logits_ptr + tl.where(counted, target, 0)).to(tl.float32)
    capped, slope = cap_logit(chosen, turn, lift, CAPPED, HARDWARE)
    tl.store(losses_ptr + row, tl.where(counted, (log_sum - gain * capped) / LOG2_E, 0.0))
    if WITH_GRADIENT:
        tl.debug_barrier()  # the target's logit is read by all threads before its owner overwrites it
        at_target = (tl.exp2(gain * capped - log_sum) - 1.0) * slope
        log_sum = tl.where(counted, log_sum, float("inf"))  # all probabilities 0: no gradient
        for start in range(0, whole, BLOCK):
            z = tl.load(logits_ptr + start + columns).to(tl.float32)
            d = logit_gradient(z, turn, lift, gain, log_sum, CAPPED, HARDWARE)
            tl.store(logits_ptr + start + columns, d.to(logits_ptr.dtype.element_ty))
        rest = logit_gradient(rest, turn, lift, gain, log_sum, CAPPED, HARDWARE)
        tl.store(logits_ptr + last, rest.to(logits_ptr.dtype.element_ty), mask=inside)
        tl.debug_barrier()  # then the one that differs, once more
        tl.store(logits_ptr + target, at_target.to(logits_ptr.dtype.element_ty), mask=counted)


@triton.jit
def head_loss_targets(
    slopes_ptr, sums_ptr, x_ptr, weight_ptr, targets_ptr, losses_ptr, shares_ptr, shared_x_ptr, rows, parts, vocab,
    width, cap, lift, ignore, WITH_GRADIENT: tl.constexpr, HARDWARE: tl.constexpr, PARTS: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """What is left to do for ROWS rows whose slopes and sums of exponentials are known, the sums in `parts` parts:
    their losses; the slope at each target, where the gradient is another; the share that a row's slopes are to be
    multiplied by, and x times it. PARTS and WIDTH: the next powers of two."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # rows x columns passes 2^31
    inside = row < rows
    target = tl.load(targets_ptr + row, mask=inside, other=ignore)
    counted = target != ignore
    part, column = tl.arange(0, PARTS), tl.arange(0, WIDTH)
    known = (part < parts)[:, None] & inside[None, :]
    sums = tl.load(sums_ptr + part[:, None].to(tl.int64) * rows + row[None, :], mask=known, other=0.0)
    total = tl.where(inside, tl.sum(sums, 0), 1.0)
    filled = inside[:, None] & (column < width)[None, :]
    x = tl.load(x_ptr + row[:, None] * width + column[None, :], mask=filled, other=0.0).to(tl.float32)
    chosen = tl.where(counted, target, 0)[:, None] * width + column[None, :]
    z = tl.sum(x * tl.load(weight_ptr + chosen, mask=filled, other=0.0).to(tl.float32), 1)
    capped, slope = cap_logit(z, 1.0 / cap, lift, True, HARDWARE)
    y = LOG2_E * cap * capped
    tl.store(losses_ptr + row, tl.where(counted, (tl.log2(total) - y) / LOG2_E, 0.0), mask=inside)
    if WITH_GRADIENT:
        share = tl.where(counted, 1.0 / total, 0.0)
        tl.store(shares_ptr + row, share, mask=inside)
        scaled = (x * share[:, None]).to(shared_x_ptr.dtype.element_ty)
        tl.store(shared_x_ptr + row[:, None] * width + column[None, :], scaled, mask=filled)
        at_target = ((tl.exp2(y) - total) * slope).to(slopes_ptr.dtype.element_ty)
        tl.store(slopes_ptr + row * vocab + target, at_target, mask=counted)


@triton.jit
def log_sum_of_row(
    logits_ptr, whole, rest, inside, turn, lift, gain, CAPPED: tl.constexpr, SHIFTED: tl.constexpr,
    HARDWARE: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Logarithm in base 2 of the sum of exponentials: of `whole` logits in memory, and of the `rest`."""
    tail_top, tail_sum = start_sum(TAIL, SHIFTED)
    tail_top, tail_sum = add_exponentials(tail_top, tail_sum, rest, turn, lift, gain, inside, CAPPED, SHIFTED, HARDWARE)
    tail_top, tail_sum = end_sum(tail_top, tail_sum)
    largest, total = start_sum(BLOCK, SHIFTED)  # by lane, so that a block needs no reduction
    for start in range(0, whole, BLOCK):
        z = tl.load(logits_ptr + start + tl.arange(0, BLOCK)).to(tl.float32)
        largest, total = add_exponentials(largest, total, z, turn, lift, gain, True, CAPPED, SHIFTED, HARDWARE)
    block_top, block_sum = end_sum(largest, total)
    top = tl.maximum(tail_top, block_top)
    return top + tl.log2(tail_sum * tl.exp2(tail_top - top) + block_sum * tl.exp2(block_top - top))


@triton.jit
def start_sum(LANES: tl.constexpr, SHIFTED: tl.constexpr):
    """Maximum and sum of exponentials, by lane."""
    largest = tl.zeros((LANES,), tl.float32)
    if SHIFTED:
        largest += LOWEST
    return largest, tl.zeros((LANES,), tl.float32)


@triton.jit
def end_sum(largest, total):
    """Maximum and sum of all lanes."""
    top = tl.max(largest, 0)
    return top, tl.sum(total * tl.exp2(largest - top), 0)


@triton.jit
def cap_logit(z, turn, lift, CAPPED: tl.constexpr, HARDWARE: tl.constexpr):
    """tanh(z/cap) and its slope by z; without a cap z and 1."""
    slope = z * 0.0 + 1.0
    if CAPPED:
        z = tanh(z * turn + lift, HARDWARE)
        slope = 1.0 - z * z
    return z, slope


@triton.jit
def add_exponentials(
    largest, total, z, turn, lift, gain, inside, CAPPED: tl.constexpr, SHIFTED: tl.constexpr, HARDWARE: tl.constexpr
):
    """Running maximum and sum, by lane, with one more block. Without SHIFTED arguments are bounded, and the sum takes
    exponentials off the unit that tanh waits for."""
    y = gain * cap_logit(z, turn, lift, CAPPED, HARDWARE)[0]
    if SHIFTED:
        y = tl.where(inside, y, LOWEST)
        new = tl.maximum(largest, y)
        total = total * tl.exp2(largest - new) + tl.where(inside, tl.exp2(y - new), 0.0)
        largest = new
    else:
        total += tl.where(inside, exp2_by_sums(y), 0.0)
    return largest, total


@triton.jit
def logit_gradient(z, turn, lift, gain, log_sum, CAPPED: tl.constexpr, HARDWARE: tl.constexpr):
    """Of a logit that is not the target's."""
    capped, slope = cap_logit(z, turn, lift, CAPPED, HARDWARE)
    return tl.exp2(gain * capped - log_sum) * slope


@triton.jit
def exp2_by_sums(x):
    """2^x for |x| < 100 within 3e-7 of it by sums and products alone: adding 1.5·2^23 leaves the nearest integer in the
    low bits, which become the exponent, and a polynomial does the rest. Fitted by least squares."""
    shifted = x + 12582912.0
    f = x - (shifted - 12582912.0)
    p = ((1.32764444e-3 * f + 9.6755377e-3) * f + 5.55071332e-2) * f + 0.240221198
    p = (p * f + 0.693146967) * f + 1.00000007
    return (p.to(tl.int32, bitcast=True) + (shifted.to(tl.int32, bitcast=True) << 23)).to(tl.float32, bitcast=True)


@triton.jit
def tanh(x, HARDWARE: tl.constexpr):
    """HARDWARE: one instruction, within 2^-11 of tanh relative to it, a quarter of what rounding did to a bf16 logit.
    Else x P(x²)/Q(x²) on [-6, 6], within 6e-7; beyond, tanh(6), within 1.3e-5. Fitted by least squares."""
    if HARDWARE:
        y = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        x = tl.minimum(tl.maximum(x, -6.0), 6.0)
        s = x * x
        p = ((4.50662795e-06 * s + 2.39123084e-03) * s + 0.124265780) * s + 0.999998692
        q = ((1.55124335e-04 * s + 2.15948640e-02) * s + 0.457594115) * s + 1.0
        r = tl.rsqrt(q)
        y = x * p * (r * r)
    return y


@torch.library.custom_op("paceline::head_loss", mutates_args=())
def _head_loss(
    x: Tensor, weight: Tensor, targets: Tensor, cap: float | None, shift: float, with_gradient: bool, chunk_tokens: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Total loss and, if asked for, its gradient with respect to x, up to a factor for each row, these factors in fp32,
    and its gradient with respect to weight; else three empty tensors."""
    losses = torch.empty(x.size(0), device=x.device)
    shares = torch.ones(x.size(0) if with_gradient else 0, device=x.device)
    grad_x = torch.empty_like(x) if with_gradient else x.new_empty(0)
    grad_weight = torch.zeros(weight.shape, device=x.device) if with_gradient else weight.new_empty(0)
    buffer = x.new_empty(min(chunk_tokens, x.size(0)), weight.size(0))
    for first in range(0, x.size(0), chunk_tokens):
        part = slice(first, first + chunk_tokens)
        slopes = buffer[: x[part].size(0)]
        shared_x = _slopes(x[part], weight, targets[part], (cap, shift), slopes, losses[part], shares[part])
        if with_gradient:
            torch.mm(slopes, weight, out=grad_x[part])
            _add_product(grad_weight, slopes.T, shared_x)
    return losses.sum(), grad_x, shares, grad_weight.to(weight.dtype)


def _slopes(
    x: Tensor, weight: Tensor, targets: Tensor, bounds: Bounds, slopes: Tensor, losses: Tensor, shares: Tensor
) -> Tensor:
    """Losses of these rows into `losses`. Unless `shares` is empty, into `slopes` the gradient of their logits, up to a
    factor for each row that goes into `shares`; x times it comes back."""
    (cap, shift), with_gradient = bounds, len(shares) > 0
    if cap is None or cap > UNSHIFTED_CAP or not all(_addressable(t) for t in (x, weight, slopes)):
        torch.mm(x, weight.T, out=slopes)
        launch_rows(slopes, targets, losses, bounds, with_gradient=with_gradient)
        return x
    from paceline.kernels.gemm_pingpong import slopes_and_sums  # the interpreter of Triton knows no Gluon

    sums = slopes_and_sums(x, weight, cap, shift, out=slopes)
    return launch_targets(slopes, sums, x, weight, targets, losses, shares, (cap, shift))


def _addressable(matrix: Tensor) -> bool:
    """Whether it is on a GPU, in bf16, and the copy engine can move blocks of it."""
    whole_rows = matrix.is_contiguous() and matrix.size(1) * matrix.element_size() % ADDRESS_BYTES == 0
    return matrix.is_cuda and matrix.dtype == torch.bfloat16 and whole_rows and matrix.data_ptr() % ADDRESS_BYTES == 0


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total ← total + a b, total fp32; on a GPU inside the product, whatever the format of its operands."""
    if total.is_cuda and a.dtype != total.dtype:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b


def launch_rows(logits: Tensor, targets: Tensor, losses: Tensor, bounds: Bounds, *, with_gradient: bool) -> None:
    """Losses of these rows into `losses`; with `with_gradient`, their gradients over `logits`."""
    (rows, vocab), (cap, shift) = logits.shape, bounds
    switches = {"CAPPED": cap is not None, "SHIFTED": cap is None or cap > UNSHIFTED_CAP}
    switches |= {"WITH_GRADIENT": with_gradient, "HARDWARE": _by_hardware(logits)}
    sizes = {"BLOCK": BLOCK, "TAIL": triton.next_power_of_2(vocab % BLOCK or 1), "num_warps": WARPS}
    given = (vocab, *((1.0, 0.0) if cap is None else (cap, shift / cap)), IGNORE_TARGET)
    head_loss_rows[(rows,)](logits, targets, losses, *given, **switches, **sizes)


def launch_targets(
    slopes: Tensor,
    sums: Tensor,
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    losses: Tensor,
    shares: Tensor,
    bounds: tuple[float, float],
) -> Tensor:
    """Losses of these rows into `losses`. `slopes` and `sums` are those of `gemm_pingpong.slopes_and_sums`. Unless
    `shares` is empty, the slopes at targets are exchanged, so that shares·slopes is the gradient of the logits; back
    comes x times its share."""
    (rows, vocab), (parts, width) = slopes.shape, (sums.size(0), x.size(1))
    shared_x, given = torch.empty_like(x), (bounds[0], bounds[1] / bounds[0], IGNORE_TARGET)
    tensors = (slopes, sums, x, weight, targets, losses, shares, shared_x)
    sizes = {"PARTS": triton.next_power_of_2(parts), "WIDTH": triton.next_power_of_2(width), "ROWS": TARGET_ROWS}
    options = {"WITH_GRADIENT": len(shares) > 0, "HARDWARE": _by_hardware(slopes), "num_warps": TARGET_WARPS}
    grid = (triton.cdiv(rows, TARGET_ROWS),)
    head_loss_targets[grid](*tensors, rows, parts, vocab, width, *given, **sizes, **options)
    return shared_x


def _by_hardware(logits: Tensor) -> bool:
    """Whether the GPU's tanh is exact enough for them."""
    return logits.is_cuda and logits.dtype == torch.bfloat16


@_head_loss.register_fake
def _(x, weight, targets, cap, shift, with_gradient, chunk_tokens):
    total, rows = x.new_empty((), dtype=torch.float32), x.size(0) if with_gradient else 0
    grads = (torch.empty_like(x), torch.empty_like(weight)) if with_gradient else (x.new_empty(0), weight.new_empty(0))
    return total, grads[0], x.new_empty(rows, dtype=torch.float32), grads[1]


def _keep(ctx, inputs, output) -> None:
    ctx.save_for_backward(*output[1:])


def _scale(ctx, grad_total, *_):
    grad_x, shares, grad_weight = ctx.saved_tensors
    scaled_x = (grad_total * shares[:, None] * grad_x).to(grad_x.dtype)
    return scaled_x, (grad_total * grad_weight).to(grad_weight.dtype), *(None,) * 5


_head_loss.register_autograd(_scale, setup_context=_keep)
