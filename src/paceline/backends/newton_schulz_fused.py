"""Muon's iteration with symmetric products computed once, by Triton kernels. Plain twin: `optim.newton_schulz`."""

from typing import Any, Literal

import torch
from torch import Tensor

from paceline.kernels.symmetric_fused import fits, gram, gram_polynomial
from paceline.optim.newton_schulz import orthogonalise


def orthogonalise_symmetric(
    G: Tensor, *, dtype: torch.dtype, association: Literal["polynomial_first", "product_first"], **settings: Any
) -> Tensor:
    """`orthogonalise` with the polynomial first and symmetric products computed once, by Triton kernels; other formats,
    the other association and shapes that the kernels cannot cut go the plain way, and so does no matrix at all."""
    known = association == "polynomial_first" and (dtype == torch.bfloat16 or not G.is_cuda)  # a CPU interprets it
    known = known and G.numel() > 0 and fits(min(G.shape[-2:]), max(G.shape[-2:]))
    return orthogonalise(G, dtype=dtype, association=association, **settings, advance=_symmetric if known else None)


def _symmetric(X: Tensor, a: float, b: float, c: float) -> Tensor:
    X = X.contiguous()
    return torch.baddbmm(X, gram_polynomial(gram(X), b, c), X, beta=a)
