"""The optimizer's mathematics written a second time, slowly and in float64, to judge the fast versions by."""

import math

import torch
from torch import Tensor

A, B, C = 3.4445, -4.7750, 2.0315


def quintic(sigma: Tensor, rounds: int = 5) -> Tensor:
    """What Newton–Schulz does to a single singular value."""
    for _ in range(rounds):
        sigma = A * sigma + B * sigma**3 + C * sigma**5
    return sigma


def orthogonal_factor(G: Tensor, rounds: int = 5) -> Tensor:
    """Newton–Schulz of one matrix by singular values: the vectors stay, each value goes through the scalar map."""
    U, sigma, Vh = torch.linalg.svd(G.double(), full_matrices=False)
    return U @ torch.diag(quintic(sigma / (sigma.square().sum().sqrt() + 1e-7), rounds)) @ Vh


def muon_steps(
    M: Tensor, grads: list[Tensor], *, lrs: list[float], momenta: list[float], form: str, rule: str, decay: float = 0.0
) -> Tensor:
    """One matrix under Muon for `len(grads)` steps, straight from the formulas."""
    M, b = M.double(), torch.zeros_like(M, dtype=torch.float64)
    rows, cols = M.shape
    for G, lr, mu in zip(grads, lrs, momenta, strict=True):
        if form == "sum":
            b = mu * b + G
            U = G + mu * b
        else:
            b = mu * b + (1 - mu) * G
            U = (1 - mu) * G + mu * b
        g = math.sqrt(max(rows, cols)) if rule == "longest_side" else math.sqrt(max(1, rows / cols))
        M = (1 - lr * decay) * M - lr * g * orthogonal_factor(U)
    return M


def adam_step(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, *, t: int, lr: float, betas: tuple[float, float], decay: float
) -> tuple[Tensor, Tensor, Tensor]:
    """One AdamW step in float64 from stored values: the new parameter and moments before any rounding."""
    p, g, m, v = (tensor.double() for tensor in (p, g, m, v))
    m = betas[0] * m + (1 - betas[0]) * g
    v = betas[1] * v + (1 - betas[1]) * g * g
    m_hat, v_hat = m / (1 - betas[0] ** t), v / (1 - betas[1] ** t)
    return (1 - lr * decay) * p - lr * m_hat / (v_hat.sqrt() + 1e-8), m, v


def adam_rows_step(
    p: Tensor, g: Tensor, v: Tensor, *, t: int, lr: float, beta2: float, eps: float, decay: float
) -> tuple[Tensor, Tensor]:
    """One update of a whole table in float64, by a dense gradient (rows, width) and one second moment per row: Adam
    without a first moment. The decay acts where it and the update point the same way."""
    p, g, v = (tensor.double() for tensor in (p, g, v))
    v = beta2 * v + (1 - beta2) * (g * g).mean(dim=1)
    update = lr * math.sqrt(1 - beta2**t) * g / (v.sqrt() + eps)[:, None]
    return p - update - torch.where(update * p > 0, lr * decay * p, 0.0), v
