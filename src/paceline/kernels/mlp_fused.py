"""The ReLU² MLP with its activation inside the products, for a Hopper GPU with Triton. Plain twin: `model.block`.

The activation is applied before the first product is stored, and its slope before that of the backward product: two
passes over (tokens, hidden) forward and three backward fall away. Only the activated values are kept, from which the
slope follows: d relu(z)²/dz = 2 relu(z) = 2 sqrt(relu(z)²). That halves what an MLP keeps for the backward pass.
"""

import torch
from torch import Tensor

from paceline.kernels.gemm_epilogue import relu2_product


def mlp_fused(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """relu(x upᵀ)² downᵀ. x (N, width), up (hidden, width), down (width, hidden), all in the compute format."""
    y, _ = _mlp(x, up, down)
    return y


@torch.library.custom_op("paceline::mlp", mutates_args=())
def _mlp(x: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    """The output, and the activated values (N, hidden) for the backward pass."""
    kept = relu2_product(x, up)
    return kept @ down.T, kept


@_mlp.register_fake
def _(x, up, down):
    return torch.empty_like(x), x.new_empty(x.size(0), up.size(0))


@torch.library.custom_op("paceline::mlp_backward", mutates_args=())
def _mlp_backward(grad: Tensor, x: Tensor, up: Tensor, down: Tensor, kept: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, up and down."""
    grad_down = grad.T @ kept
    if grad.is_cuda:
        from paceline.kernels.gemm_pingpong import slope_product

        hidden = slope_product(grad, down, kept)
    else:  # the interpreter of Triton knows no Gluon
        hidden = (grad @ down) * (2.0 * kept.sqrt())
    return hidden @ up, hidden.T @ x, grad_down


@_mlp_backward.register_fake
def _(grad, x, up, down, kept):
    return torch.empty_like(x), torch.empty_like(up), torch.empty_like(down)


def _keep(ctx, inputs, output):
    ctx.save_for_backward(*inputs, output[1])


def _backward(ctx, grad, _):
    return _mlp_backward(grad.contiguous(), *ctx.saved_tensors)


_mlp.register_autograd(_backward, setup_context=_keep)
