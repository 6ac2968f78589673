"""Head, cap and loss by chunks of tokens, so that the logits of all tokens never exist at once.

The plain twin is `model.loss`: product, cap, cross entropy. Here a chunk's logits live only while they are in use; the
backward pass computes them again from what was kept, the log of each token's softmax denominator. That costs one more
product with the head and saves every pass over a (tokens x vocabulary) array: on a CPU the chunk stays in the cache.
"""

import torch
from torch import Tensor

from paceline.core.units import IGNORE_TARGET
from paceline.settings.backends import head_chunk_tokens


def head_loss_chunked(
    x: Tensor, weight: Tensor, targets: Tensor, cap: float | None, shift: float = 0.0, chunk_tokens: int | None = None
) -> Tensor:
    """Loss of every token, (N,) fp32, from normalised activations x (N, width) and head rows (V, width), both in the
    compute format; targets (N,). A target that does not count gives 0."""
    losses: Tensor = _head_loss(x, weight, targets, cap, shift, chunk_tokens or head_chunk_tokens(weight.size(0)))[0]
    return losses


def _capped(logits: Tensor, cap: float | None, shift: float) -> Tensor:
    """In place."""
    return logits if cap is None else logits.add_(shift).div_(cap).tanh_().mul_(cap)


@torch.library.custom_op("paceline::head_loss_chunked", mutates_args=())
def _head_loss(
    x: Tensor, weight: Tensor, targets: Tensor, cap: float | None, shift: float, chunk: int
) -> tuple[Tensor, Tensor]:
    """Losses, and the logs of the denominators. An operator, so that a compiler does not unroll the chunks."""
    counted = targets != IGNORE_TARGET
    log_sums, chosen = [], []
    for x_c, target_c in zip(x.split(chunk), targets.where(counted, 0).split(chunk), strict=True):
        logits = _capped((x_c @ weight.T).float(), cap, shift)
        log_sums.append(logits.logsumexp(-1))
        chosen.append(logits.gather(-1, target_c[:, None])[:, 0])
    log_sum = torch.cat(log_sums)
    return (log_sum - torch.cat(chosen)) * counted, log_sum


@torch.library.custom_op("paceline::head_loss_chunked_backward", mutates_args=())
def _head_loss_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    log_sum: Tensor,
    cap: float | None,
    shift: float,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """Gradients of x and weight."""
    counted = targets != IGNORE_TARGET
    safe, scale = targets.where(counted, 0), grad * counted
    grad_x, grad_weight = torch.empty_like(x), torch.zeros(weight.shape, device=x.device)
    for first in range(0, x.size(0), chunk):
        part = slice(first, first + chunk)
        logits = _capped((x[part] @ weight.T).float(), cap, shift)
        slope = None if cap is None else logits.square().div_(-(cap**2)).add_(1.0)  # of cap·tanh(z/cap)
        d = logits.sub_(log_sum[part, None]).exp_()  # softmax
        d.scatter_add_(1, safe[part, None], d.new_full((d.size(0), 1), -1.0))
        d = (d if slope is None else d.mul_(slope)).mul_(scale[part, None]).to(x.dtype)
        torch.mm(d, weight, out=grad_x[part])
        grad_weight += d.T @ x[part]
    return grad_x, grad_weight.to(weight.dtype)


@_head_loss.register_fake
def _(x, weight, targets, cap, shift, chunk):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    return x.new_empty(x.size(0), dtype=torch.float32), x.new_empty(x.size(0), dtype=torch.float32)


@_head_loss_backward.register_fake
def _(grad, x, weight, targets, log_sum, cap, shift, chunk):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    return torch.empty_like(x), torch.empty_like(weight)


def _keep(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
    x, weight, targets, *ctx.rest = inputs
    ctx.save_for_backward(x, weight, targets, output[1])


def _backward(ctx, grad, _):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    return *_head_loss_backward(grad, *ctx.saved_tensors, *ctx.rest), None, None, None, None


_head_loss.register_autograd(_backward, setup_context=_keep)
