"""Polar Express, NorMuon and cautious decay, each against its formula in float64 or an oracle worked out by hand."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from optim.building import optimizer_of, settings
from paceline.core.errors import ConfigError
from paceline.optim.newton_schulz import POLAR_EXPRESS, POLAR_MARGIN, orthogonalise
from paceline.optim.rules.muon import evened
from paceline.recipes.presets import preset
from paceline.settings.optim import POLAR_EXPRESS_MAPS, MuonConfig, OptimConfig

PLAIN = {"steps": 5, "association": "polynomial_first", "norm_of": "rounded"}


def seeded(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def composite(sigma: Tensor) -> Tensor:
    for a, b, c in POLAR_EXPRESS:
        sigma = a * sigma + b * sigma**3 + c * sigma**5
    return sigma


@pytest.mark.parametrize(
    ("sigma", "expected"), [(0.001, 0.8589), (0.01, 1.0271), (0.1, 1.0592), (0.5, 0.9106), (0.95, 0.9981)]
)
def test_polar_express_sends_singular_values_where_it_was_designed_to(sigma: float, expected: float) -> None:
    assert composite(torch.tensor(sigma, dtype=torch.float64)).item() == pytest.approx(expected, abs=5e-5)


def test_its_band_and_its_slope() -> None:
    sigma = torch.linspace(0.001, 0.98, 100_001, dtype=torch.float64)
    assert 0.858 < composite(sigma).min() < composite(sigma).max() < 1.142
    assert composite(torch.tensor(1e-9, dtype=torch.float64)).item() / 1e-9 == pytest.approx(989, abs=1)
    assert len(POLAR_EXPRESS) == POLAR_EXPRESS_MAPS


@pytest.mark.parametrize("association", ["polynomial_first", "product_first"])
@pytest.mark.parametrize("shape", [(12, 12), (8, 20), (20, 8)])
def test_a_matrix_goes_by_its_singular_values(shape: tuple[int, int], association: str) -> None:
    G = seeded(*shape)
    U, sigma, Vh = torch.linalg.svd(G, full_matrices=False)
    scaled = sigma / (POLAR_MARGIN * sigma.square().sum().sqrt() + 1e-7)
    found = orthogonalise(G, **PLAIN | {"association": association}, dtype=torch.float64, maps="polar_express")  # type: ignore[arg-type]
    assert_close(found, U @ torch.diag(composite(scaled)) @ Vh, rtol=0, atol=1e-9)


def test_a_matrix_of_rank_1_does_not_diverge_in_bf16() -> None:
    G = seeded(64, 1) @ seeded(1, 96, seed=1)
    found = orthogonalise(G.float(), **PLAIN, dtype=torch.bfloat16, maps="polar_express")  # type: ignore[arg-type]
    assert torch.linalg.matrix_norm(found.float(), 2) < 1.2


def test_more_rounds_than_maps_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--optim\.muon\.ns-steps 6: Polar Express has 5 maps"):
        MuonConfig(ns_maps="polar_express", ns_steps=6)


@pytest.mark.parametrize(("shape", "sides"), [((5, 3), (5, 1)), ((3, 5), (1, 5)), ((4, 4), (4, 1))])
def test_evening_keeps_the_norm_and_works_along_the_long_side(shape: tuple[int, int], sides: tuple[int, int]) -> None:
    X, power = seeded(2, *shape).float(), torch.zeros(2, *sides)
    found = evened(X, power, 0.1)
    assert_close(torch.linalg.matrix_norm(found), torch.linalg.matrix_norm(X))
    kept = -1 if sides[1] == 1 else -2
    assert_close(found.square().mean(kept), found.square().mean(kept).mean(-1, keepdim=True).expand(2, max(shape)))


def test_rows_of_equal_power_stay_as_they_are_and_a_small_one_is_lifted() -> None:
    X = torch.tensor([[[3.0, 4.0], [4.0, -3.0], [0.0, 5.0]]])
    assert_close(evened(X, torch.zeros(1, 3, 1), 0.1), X)
    small = X * torch.tensor([[1.0], [0.1], [1.0]])
    found = evened(small, torch.zeros(1, 3, 1), 0.1)
    assert found[0, 1].norm() > 5 * small[0, 1].norm()


def test_transposing_a_square_matrix_changes_the_result() -> None:
    """Rows are evened, not columns."""
    X = torch.tensor([[[3.0, 4.0], [0.6, 0.8]]])
    assert not torch.allclose(evened(X, torch.zeros(1, 2, 1), 0.1).mT, evened(X.mT, torch.zeros(1, 2, 1), 0.1))


def test_a_matrix_of_zeros_stays_one() -> None:
    assert not evened(torch.zeros(1, 3, 2), torch.zeros(1, 3, 1), 0.1).any()


def by_formula(M: Tensor, grads: list[Tensor], *, lr: float, decay: float, beta2: float) -> Tensor:
    """NorMuon with cautious decay for one matrix, rows >= columns, momentum 0.9 as an average."""
    M, b, s = M.double(), torch.zeros_like(M, dtype=torch.float64), torch.zeros(len(M), 1, dtype=torch.float64)
    for G in grads:
        b = 0.9 * b + 0.1 * G
        U = 0.1 * G + 0.9 * b
        left, sigma, right = torch.linalg.svd(U.double(), full_matrices=False)
        X = left @ torch.diag(composite(sigma / (POLAR_MARGIN * sigma.square().sum().sqrt() + 1e-7))) @ right
        s = beta2 * s + (1 - beta2) * X.square().mean(1, keepdim=True)
        Y = X / s.sqrt()
        Y = Y * X.norm() / Y.norm()
        rate = lr * (len(M) / M.shape[1]) ** 0.5
        M = M - rate * Y - rate * decay * lr * M * (Y * M >= 0)
    return M


NORMUON = OptimConfig(muon=MuonConfig(ns_maps="polar_express", row_beta2=0.9, cautious_decay=True))


def test_three_steps_are_those_of_the_formula_and_a_saved_state_goes_on_to_the_same_bits() -> None:
    start, grads = seeded(6, 4, seed=3).float(), [seeded(6, 4, seed=n).float() for n in range(4)]
    weight = nn.Parameter(start.clone())
    optimizer = optimizer_of({"matrices": {"w": weight}}, NORMUON)
    at = settings(0.1, momentum=0.9, weight_decay=0.5)
    for grad in grads[:3]:
        weight.grad = grad.clone()
        optimizer.step({"matrices": at})
    assert_close(
        weight.detach().double(), by_formula(start, grads[:3], lr=0.1, decay=0.5, beta2=0.9), rtol=0, atol=2e-5
    )
    other = nn.Parameter(weight.detach().clone())
    resumed = optimizer_of({"matrices": {"w": other}}, NORMUON)
    resumed.load_state_dict(optimizer.state_dict())
    for each, param in ((optimizer, weight), (resumed, other)):
        param.grad = grads[3].clone()
        each.step({"matrices": at})
    assert torch.equal(weight, other)


def test_a_skipped_step_changes_nothing() -> None:
    weight = nn.Parameter(seeded(6, 4).float())
    optimizer = optimizer_of({"matrices": {"w": weight}}, NORMUON)
    weight.grad = seeded(6, 4, seed=1).float()
    optimizer.step({"matrices": settings(0.1, weight_decay=0.5)})
    before, state = weight.detach().clone(), optimizer.state_dict()
    weight.grad = torch.full((6, 4), torch.nan)
    optimizer.step({"matrices": settings(0.1, weight_decay=0.5)}, skip=torch.tensor(True))
    assert torch.equal(weight, before)
    assert all(torch.equal(state[name], now) for name, now in optimizer.state_dict().items())


def test_decay_moves_only_weights_that_the_update_makes_smaller() -> None:
    weight, grad = seeded(5, 5, seed=7).float(), seeded(5, 5, seed=8).float()
    moved = []
    for decay in (0.0, 2.0):
        param = nn.Parameter(weight.clone())
        param.grad = grad.clone()
        config = OptimConfig(muon=MuonConfig(cautious_decay=True))
        optimizer_of({"matrices": {"w": param}}, config).step({"matrices": settings(0.1, weight_decay=decay)})
        moved.append(param.detach())
    update, difference = weight - moved[0], moved[0] - moved[1]
    shrinks = update * weight >= 0
    assert_close(difference[shrinks], (0.1 * 2.0 * 0.1 * weight)[shrinks])
    assert not difference[~shrinks].any()


def test_several_matrices_in_one_parameter_keep_a_power_each() -> None:
    weight = nn.Parameter(seeded(10, 4).float())
    optimizer = optimizer_of({"matrices": {"qkv": weight}}, NORMUON, parts={"qkv": (4, 3, 3)})
    shapes = {n: tuple(t.shape) for n, t in optimizer.state_dict().items() if "power" in n}
    assert shapes == {"muon.power.qkv.0": (4, 1), "muon.power.qkv.1": (1, 4), "muon.power.qkv.2": (1, 4)}


def test_fsdp_is_refused() -> None:
    run = preset("demo")
    with pytest.raises(ConfigError, match=r"--optim\.muon\.row-beta2 needs whole matrices"):
        replace(run, optim=NORMUON, parallel=replace(run.parallel, fsdp=True))
