"""Newton–Schulz against the singular value decomposition, in float64 where both sides could be wrong."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis.strategies import integers, sampled_from
from torch import Tensor
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from optim.oracles import orthogonal_factor, quintic
from paceline.optim.newton_schulz import orthogonalise


def seeded(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def plain(G: Tensor, **changes: object) -> Tensor:
    settings = {"steps": 5, "dtype": torch.float64, "association": "polynomial_first", "norm_of": "rounded"}
    return orthogonalise(G, **{**settings, **changes})  # type: ignore[arg-type]


def with_singular_values(sigma: Tensor, rows: int, cols: int) -> Tensor:
    """A matrix of these singular values with random singular vectors."""
    U, _ = torch.linalg.qr(seeded(rows, len(sigma), seed=1))
    V, _ = torch.linalg.qr(seeded(cols, len(sigma), seed=2))
    return U @ torch.diag(sigma) @ V.mT


def test_the_scalar_map_ends_in_the_band() -> None:
    """The published figures for five rounds: [0.003, 1] into [0.68, 1.21], and 0.001 only to 0.47."""
    sigma = torch.logspace(-2.5229, 0, 100_001, dtype=torch.float64)
    assert quintic(sigma).min() > 0.68
    assert quintic(sigma).max() < 1.21
    assert quintic(torch.tensor(0.001)).item() == pytest.approx(0.47, abs=0.005)


@pytest.mark.parametrize("association", ["polynomial_first", "product_first"])
@pytest.mark.parametrize(("rows", "cols"), [(24, 24), (16, 64), (64, 16)])
def test_singular_vectors_stay_and_values_enter_the_band(rows: int, cols: int, association: str) -> None:
    small = torch.linspace(0.003, 0.2, min(rows, cols) - 1, dtype=torch.float64)
    sigma = torch.cat([small, (1 - small.square().sum()).sqrt()[None]])  # of norm 1, so normalising leaves them alone
    G = with_singular_values(sigma, rows, cols)
    U, _, Vh = torch.linalg.svd(G, full_matrices=False)
    core = U.mT @ plain(G, association=association) @ Vh.mT
    assert_close(core, torch.diag(core.diagonal()), rtol=0, atol=1e-9)
    assert core.diagonal().min() > 0.68
    assert core.diagonal().max() < 1.21


@settings(max_examples=40, deadline=None)
@given(
    rows=integers(1, 24),
    cols=integers(1, 24),
    rounds=integers(1, 6),
    association=sampled_from(["polynomial_first", "product_first"]),
    seed=integers(0, 2**31),
)
def test_it_is_the_scalar_map_on_singular_values(
    rows: int, cols: int, rounds: int, association: str, seed: int
) -> None:
    G = seeded(rows, cols, seed=seed)
    assert_close(plain(G, steps=rounds, association=association), orthogonal_factor(G, rounds), rtol=0, atol=1e-9)


@settings(max_examples=25, deadline=None)
@given(batch=sampled_from([(1,), (3,), (2, 3), (0,)]), rows=integers(1, 20), cols=integers(1, 20))
def test_each_matrix_of_a_batch_is_treated_alone(batch: tuple[int, ...], rows: int, cols: int) -> None:
    size = 10.0 ** torch.arange(torch.Size(batch).numel(), dtype=torch.float64)
    G = seeded(*batch, rows, cols) * size.reshape(*batch, 1, 1)  # unequal, so that a shared norm would show
    X = plain(G)
    assert X.shape == G.shape
    for x, g in zip(X.reshape(-1, rows, cols), G.reshape(-1, rows, cols), strict=True):
        assert_close(x, orthogonal_factor(g), rtol=0, atol=1e-9)


@pytest.mark.parametrize("association", ["polynomial_first", "product_first"])
def test_fp32_agrees_with_float64(association: str) -> None:
    G = seeded(3, 96, 64, dtype=torch.float32)
    X = plain(G, dtype=torch.float32, association=association)
    assert X.dtype == torch.float32
    exact = torch.stack([orthogonal_factor(g) for g in G])
    assert_close(X.double(), exact, rtol=0, atol=2e-5)  # measured 2e-6: five rounds amplify rounding by up to 3.4 each


def test_zero_in_zero_out() -> None:
    G = torch.stack([torch.zeros(8, 5), seeded(8, 5, dtype=torch.float32)])
    X = plain(G, dtype=torch.float32)
    assert torch.equal(X[0], torch.zeros(8, 5))
    assert torch.isfinite(X).all()


def test_the_guard_is_added_to_the_norm() -> None:
    """A gradient far below the guard moves little; one far above it does not feel its own size."""
    G = seeded(6, 6)
    assert_close(plain(G * 1e6), plain(G), rtol=0, atol=1e-6)
    assert plain(G / G.norm() * 1e-10).norm() < 0.5
    assert_close(plain(G, steps=0, eps=1.0), G / (G.norm() + 1.0))


@pytest.mark.parametrize("norm_of", ["rounded", "unrounded"])
def test_the_norm_is_taken_on_the_chosen_side_of_the_rounding(norm_of: str) -> None:
    """Entries of 1 + 2^-8 - 2^-16 round to 1 in bf16, so the two norms differ by nearly half a bf16 step."""
    G = torch.full((64, 64), 1 + 2**-8 - 2**-16)
    X = plain(G, steps=0, dtype=torch.bfloat16, norm_of=norm_of)  # no rounds: no bf16 product, which a CPU may lack
    norm = 64.0 if norm_of == "rounded" else G.norm().item()
    assert X.dtype == torch.bfloat16
    assert_close(X, (torch.ones(64, 64) / norm).bfloat16(), rtol=0, atol=0)
    assert (X[0, 0] == 1 / 64) == (norm_of == "rounded")


def test_a_tall_matrix_costs_no_more_than_a_wide_one() -> None:
    counts = []
    for shape in ((4, 32), (32, 4)):
        with FlopCounterMode(display=False) as counter:
            plain(seeded(*shape))
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] == 5 * (2 * 2 * 4 * 4 * 32 + 2 * 4**3)


def test_it_compiles_as_one_graph() -> None:
    G = seeded(2, 12, 7, dtype=torch.float32)
    compiled = torch.compile(orthogonalise, fullgraph=True, backend="eager")
    X = compiled(G, steps=5, dtype=torch.float32, association="polynomial_first", norm_of="rounded")
    assert torch.equal(X, plain(G, dtype=torch.float32))
