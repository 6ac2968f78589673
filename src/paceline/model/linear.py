"""Weight matrices without biases: stored in fp32, used in the compute format."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.model.config import PrecisionConfig
from paceline.model.dtypes import torch_dtype


def matrix(rows: int, columns: int) -> nn.Parameter:
    """An uninitialised fp32 weight of shape (out, in); `init.py` fills it."""
    return nn.Parameter(torch.empty(rows, columns))


def linear(x: Tensor, weight: Tensor, precision: PrecisionConfig) -> Tensor:
    """x Wᵀ in the compute format, whatever the formats of x and W; the result stays in that format."""
    dtype = torch_dtype(precision.compute)
    return F.linear(x.to(dtype), weight.to(dtype))


Product = Callable[[Tensor, Tensor, PrecisionConfig], Tensor]
"""As `linear`: who computes it."""


def row_product(x: Tensor, weight: Tensor, precision: PrecisionConfig) -> Tensor:
    """`linear`; where that of a single row is compiled, a sum of products, which is one kernel together with what
    precedes and follows it. Uncompiled that would be slow."""
    if x.numel() > x.size(-1) or not torch.compiler.is_compiling():
        return linear(x, weight, precision)
    dtype = torch_dtype(precision.compute)
    return (x.to(dtype)[..., None, :].float() * weight.to(dtype).float()).sum(-1).to(dtype)
