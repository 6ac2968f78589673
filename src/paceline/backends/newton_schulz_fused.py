"""Muon's iteration with symmetric products computed once, by Triton kernels. Plain twin: `optim.newton_schulz`."""

from typing import Literal

import torch
from torch import Tensor

from paceline.kernels.symmetric_fused import fits, gram, gram_polynomial
from paceline.optim.newton_schulz import Maps, coefficients_of, normalised, orthogonalise


def orthogonalise_symmetric(
    G: Tensor,
    *,
    steps: int,
    dtype: torch.dtype,
    association: Literal["polynomial_first", "product_first"],
    norm_of: Literal["rounded", "unrounded"],
    maps: Maps = "quintic",
    eps: float = 1e-7,
) -> Tensor:
    """`orthogonalise` with the polynomial first and symmetric products computed once, by Triton kernels; other formats,
    the other association and shapes that the kernels cannot cut go the plain way, and so does no matrix at all."""
    known = association == "polynomial_first" and (dtype == torch.bfloat16 or not G.is_cuda)  # a CPU interprets it
    if not known or not G.numel() or not fits(min(G.shape[-2:]), max(G.shape[-2:])):
        return orthogonalise(G, steps=steps, dtype=dtype, association=association, norm_of=norm_of, maps=maps, eps=eps)
    X = normalised(G, dtype, norm_of, maps, eps).reshape(-1, *G.shape[-2:])
    tall = G.shape[-2] > G.shape[-1]
    X = (X.mT if tall else X).contiguous()
    for a, b, c in coefficients_of(maps, steps):
        X = torch.baddbmm(X, gram_polynomial(gram(X), b, c), X, beta=a)
    return (X.mT if tall else X).reshape(G.shape)
