"""Head, cap and loss by chunks of tokens, so that the logits of all tokens never exist at once.

The plain twin is `model.loss`: product, cap, cross entropy. Here a chunk's logits live only while they are in use; the
backward pass computes them again from what was kept, the log of each token's softmax denominator. That costs one more
product with the head and saves every pass over a (tokens x vocabulary) array: on a CPU the chunk stays in the cache.
"""

import torch
from torch import Tensor

CHUNK_LOGITS = 1 << 19
"""Logits of one chunk: 2 MB of fp32."""
MIN_CHUNK_TOKENS = 256
"""But never fewer tokens than this, or a large vocabulary would leave products too thin."""


def head_loss_chunked(x: Tensor, weight: Tensor, targets: Tensor, cap: float | None, ignore: int) -> Tensor:
    """Loss of every token, (N,) fp32, from normalised activations x (N, width) and head rows (V, width), both in the
    compute format; targets (N,). A target of `ignore` gives 0."""
    losses: Tensor = _HeadLoss.apply(x, weight, targets, cap, ignore)  # type: ignore[no-untyped-call]
    return losses


def _capped(logits: Tensor, cap: float | None) -> Tensor:
    """In place."""
    return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, targets: Tensor, cap: float | None, ignore: int) -> Tensor:  # type: ignore[no-untyped-def]  # noqa: ANN001
        rows = max(MIN_CHUNK_TOKENS, CHUNK_LOGITS // weight.size(0))
        counted = targets != ignore
        safe = targets.where(counted, 0)
        log_sums, chosen = [], []
        for x_c, target_c in zip(x.split(rows), safe.split(rows), strict=True):
            logits = _capped((x_c @ weight.T).float(), cap)
            log_sums.append(logits.logsumexp(-1))
            chosen.append(logits.gather(-1, target_c[:, None])[:, 0])
        log_sum = torch.cat(log_sums)
        ctx.save_for_backward(x, weight, safe, counted, log_sum)
        ctx.cap, ctx.rows = cap, rows
        return (log_sum - torch.cat(chosen)) * counted

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:  # type: ignore[no-untyped-def, override]  # noqa: ANN001
        x, weight, targets, counted, log_sum = ctx.saved_tensors
        grad_x, grad_weight = torch.empty_like(x), torch.zeros(weight.shape, device=x.device)
        scale = grad * counted
        for first in range(0, x.size(0), ctx.rows):
            part = slice(first, first + ctx.rows)
            logits = _capped((x[part] @ weight.T).float(), ctx.cap)
            slope = None if ctx.cap is None else logits.square().div_(-(ctx.cap**2)).add_(1.0)  # of cap·tanh(z/cap)
            d = logits.sub_(log_sum[part, None]).exp_()  # softmax
            d.scatter_add_(1, targets[part, None], d.new_full((d.size(0), 1), -1.0))
            d = (d if slope is None else d.mul_(slope)).mul_(scale[part, None]).to(x.dtype)
            torch.mm(d, weight, out=grad_x[part])
            grad_weight += d.T @ x[part]
        return grad_x, grad_weight.to(weight.dtype), None, None, None
