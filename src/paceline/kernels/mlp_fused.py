"""The ReLU² MLP with its activation inside the products, for a Hopper GPU with Triton. Plain twin: `model.block`.

The activation is applied before the first product is stored, and its slope before that of the backward product: two
passes over (tokens, hidden) forward and three backward fall away. Only the activated values are kept, from which the
slope follows: d relu(z)²/dz = 2 relu(z) = 2 sqrt(relu(z)²). That halves what an MLP keeps for the backward pass.
"""

import torch
from torch import Tensor

from paceline.kernels.product_fused import product


def mlp_fused(x: Tensor, up: Tensor, down: Tensor, stream: Tensor) -> Tensor:
    """stream + relu(x upᵀ)² downᵀ. x and stream (N, width), up (hidden, width), down (width, hidden), all in the
    compute format; the sum is made inside the second product, in fp32, and rounded once."""
    y, _ = _mlp(x, up, down, stream)
    return y


@torch.library.custom_op("paceline::mlp", mutates_args=())
def _mlp(x: Tensor, up: Tensor, down: Tensor, stream: Tensor) -> tuple[Tensor, Tensor]:
    """The stream with the MLP's output added, and the activated values (N, hidden) for the backward pass."""
    kept = product(x, up, "relu2")
    return torch.addmm(stream, kept, down.T), kept


@_mlp.register_fake
def _(x, up, down, stream):
    return torch.empty_like(x), x.new_empty(x.size(0), up.size(0))


@torch.library.custom_op("paceline::mlp_backward", mutates_args=())
def _mlp_backward(grad: Tensor, x: Tensor, up: Tensor, down: Tensor, kept: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, up and down; that of the stream is `grad` itself."""
    grad_down = grad.T @ kept
    hidden = product(grad, down.T, "relu2_backward", kept)
    return hidden @ up, hidden.T @ x, grad_down


@_mlp_backward.register_fake
def _(grad, x, up, down, kept):
    return torch.empty_like(x), torch.empty_like(up), torch.empty_like(down)


def _keep(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:3], output[1])


def _backward(ctx, grad, _):
    return *_mlp_backward(grad.contiguous(), *ctx.saved_tensors), grad


_mlp.register_autograd(_backward, setup_context=_keep)
