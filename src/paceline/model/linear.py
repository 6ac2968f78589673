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
