"""Muon over stacks against one matrix at a time, and against torch's own."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis.strategies import integers, lists, sampled_from
from torch import Tensor, nn
from torch.testing import assert_close

from optim.building import float64_iteration, optimizer_of
from optim.building import settings as settings_of_step
from optim.oracles import muon_steps, orthogonal_factor
from paceline.optim.rule import Event, RuleContext, ShareWork, all_here
from paceline.optim.rules.muon import Rule, nesterov_, shape_factor
from paceline.settings.groups import param_groups
from paceline.settings.optim import MuonConfig, OptimConfig

LRS = [0.05, 0.03, 0.04, 0.01]
WARM_UP = [0.85, 0.88, 0.91, 0.94]


def seeded(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def matrices(shapes: Sequence[tuple[int, int]]) -> dict[str, nn.Parameter]:
    return {f"w{i}": nn.Parameter(seeded(*shape, seed=i)) for i, shape in enumerate(shapes)}


def gradient(name: str, shape: torch.Size, step: int) -> Tensor:
    return seeded(*shape, seed=1000 + 100 * step + int(name.strip("w")))


def muon_of(
    params: dict[str, nn.Parameter],
    config: MuonConfig,
    parts: dict[str, Sequence[int]] | None = None,
    share_work: ShareWork = all_here,
) -> Rule:
    context = RuleContext(orthogonalise=float64_iteration, muon=config, parts=parts or {}, share_work=share_work)
    group = param_groups(OptimConfig(muon=config), ["matrices"])["matrices"]
    return Rule(group, params, context)


def advance(muon: Rule, *, lr: float, momentum: float) -> None:
    decay = muon.config.weight_decay
    muon.start(Event(settings=settings_of_step(lr, momentum=momentum, weight_decay=decay), step=1))()


def run(
    params: dict[str, nn.Parameter],
    config: MuonConfig,
    *,
    parts: dict[str, Sequence[int]] | None = None,
    share_work: ShareWork = all_here,
    momenta: Sequence[float] = WARM_UP,
) -> dict[str, Tensor]:
    """Four steps of Muon in float64; the weights after them."""
    muon = muon_of(params, config, parts, share_work)
    for step, (lr, momentum) in enumerate(zip(LRS, momenta, strict=True)):
        for name, param in params.items():
            param.grad = gradient(name, param.shape, step)
        advance(muon, lr=lr, momentum=momentum)
    return {name: param.detach() for name, param in params.items()}


SHAPES = [(8, 8), (16, 8), (8, 8), (8, 16), (8, 8), (16, 8)]


@pytest.mark.parametrize("form", ["sum", "average"])
@pytest.mark.parametrize("rule", ["longest_side", "aspect"])
@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_stacks_equal_a_loop_over_single_matrices(form: str, rule: str, decay: float) -> None:
    config = MuonConfig(momentum_form=form, scale_rule=rule, weight_decay=decay)
    moved = run(matrices(SHAPES), config)
    for name, start in matrices(SHAPES).items():
        grads = [gradient(name, start.shape, step) for step in range(4)]
        expected = muon_steps(start, grads, lrs=LRS, momenta=WARM_UP, form=form, rule=rule, decay=decay)
        assert_close(moved[name], expected, rtol=0, atol=1e-9)


@settings(max_examples=20, deadline=None)
@given(shapes=lists(sampled_from([(4, 4), (8, 4), (4, 8), (1, 5)]), min_size=1, max_size=7), seed=integers(0, 999))
def test_neither_order_nor_company_changes_a_matrix(shapes: list[tuple[int, int]], seed: int) -> None:
    together = run(matrices(shapes), MuonConfig())
    order = torch.randperm(len(shapes), generator=torch.Generator().manual_seed(seed)).tolist()
    shuffled = run({f"w{i}": matrices(shapes)[f"w{i}"] for i in order}, MuonConfig())
    alone = {name: run({name: param}, MuonConfig())[name] for name, param in matrices(shapes).items()}
    for name, weight in together.items():
        assert_close(weight, shuffled[name], rtol=0, atol=1e-12)
        assert_close(weight, alone[name], rtol=0, atol=1e-12)


@pytest.mark.parametrize(("decay", "tall"), [(0.0, False), (0.1, True)])
def test_it_is_the_muon_of_torch(decay: float, tall: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.optim.Muon always iterates in bf16, which some CPUs cannot multiply; here it is made to keep its input."""
    monkeypatch.setattr(Tensor, "bfloat16", lambda self: self.clone())
    shape = (12, 6) if tall else (6, 12)
    ours = run(matrices([shape]), MuonConfig(weight_decay=decay), momenta=[0.95] * 4)["w0"]
    theirs = matrices([shape])["w0"]
    reference = torch.optim.Muon([theirs], lr=1.0, weight_decay=decay, momentum=0.95, nesterov=True)
    for step, lr in enumerate(LRS):
        reference.param_groups[0]["lr"] = lr
        theirs.grad = gradient("w0", theirs.shape, step)
        reference.step()
    assert_close(ours, theirs.detach(), rtol=0, atol=1e-6)  # torch guards by clamping the norm, we by adding 1e-7


def directions(form: str, momenta: Sequence[float]) -> list[Tensor]:
    buffer = torch.zeros(1, 4, 6, dtype=torch.float64)
    return [nesterov_(buffer, seeded(1, 4, 6, seed=i), mu, form=form) for i, mu in enumerate(momenta)]


def test_sum_and_average_point_the_same_way_while_momentum_is_constant() -> None:
    for by_sum, by_average in zip(directions("sum", [0.9] * 5), directions("average", [0.9] * 5), strict=True):
        assert_close(by_average, (1 - 0.9) * by_sum)


def test_sum_and_average_part_while_momentum_warms_up() -> None:
    by_sum, by_average = (directions(form, [0.85, 0.88, 0.91, 0.94])[-1].flatten() for form in ("sum", "average"))
    assert torch.cosine_similarity(by_sum, by_average, dim=0) < 0.9999


def test_direction_looks_ahead() -> None:
    """From rest, the sum form gives b = G and U = (1 + μ)G; plain momentum would give U = G."""
    G = seeded(2, 3, 3, seed=0)
    buffer = torch.zeros_like(G)
    assert_close(nesterov_(buffer, G, 0.9, form="sum"), 1.9 * G)
    assert_close(buffer, G)


@pytest.mark.parametrize(
    ("rows", "cols", "longest_side", "aspect"),
    [(768, 768, 27.7128, 1.0), (3072, 768, 55.4256, 2.0), (768, 3072, 55.4256, 1.0)],
)
def test_shape_factors_of_the_records(rows: int, cols: int, longest_side: float, aspect: float) -> None:
    assert shape_factor(rows, cols, "longest_side") == pytest.approx(longest_side, abs=1e-4)
    assert shape_factor(rows, cols, "aspect") == aspect


@pytest.mark.parametrize("rule", ["longest_side", "aspect"])
@pytest.mark.parametrize("rows", [(8, 8, 8), (8, 4, 4)])  # equal parts, and queries wider than keys and values
def test_a_fused_matrix_moves_as_its_parts_would(rule: str, rows: tuple[int, ...]) -> None:
    config = MuonConfig(scale_rule=rule, weight_decay=0.1)
    fused = matrices([(sum(rows), 8), (8, 8)])
    pieces = fused["w0"].detach().clone().split(list(rows))
    moved = run(fused, config, parts={"w0": rows})["w0"].split(list(rows))
    start = 0
    for piece, result in zip(pieces, moved, strict=True):
        own_grads = [gradient("w0", fused["w0"].shape, step)[start : start + len(piece)] for step in range(4)]
        expected = muon_steps(piece, own_grads, lrs=LRS, momenta=WARM_UP, form="average", rule=rule, decay=0.1)
        assert_close(result, expected, rtol=0, atol=1e-9)
        start += len(piece)


@pytest.mark.parametrize("parts", [(5, 5, 5, 5), (8, 8), (8, 8, 8, 8)])
def test_parts_that_do_not_cover_the_rows_are_refused(parts: Sequence[int]) -> None:
    with pytest.raises(ValueError, match="w0 has 24 rows"):
        run(matrices([(24, 8)]), MuonConfig(), parts={"w0": parts})


def test_work_shared_by_three_processes_gives_the_same_weights() -> None:
    """Matrix i of a stack belongs to process i mod 3; five matrices over three, so the last share is short."""

    def shared(iteration: object, stacks: list[Tensor], _: object) -> list[Tensor]:
        results = [torch.empty_like(stack) for stack in stacks]
        for rank in range(3):
            for stack, result in zip(stacks, results, strict=True):
                result[rank::3] = float64_iteration(stack[rank::3])
        return results

    shapes = [(8, 8)] * 5 + [(4, 8)]
    alone, together = run(matrices(shapes), MuonConfig()), run(matrices(shapes), MuonConfig(), share_work=shared)
    for name, weight in alone.items():
        assert_close(weight, together[name], rtol=0, atol=1e-12)


def test_output_matrices_of_mlps_move_at_a_rate_of_their_own() -> None:
    """And nothing else changes: not what a checkpoint calls their slots, and no bit of another matrix."""
    shapes = {"attn.o": (8, 16), "0.mlp.up": (16, 8), "0.mlp.down": (8, 16), "1.mlp.up": (16, 8), "1.mlp.down": (8, 16)}

    def step(rate: float) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        params = {name: nn.Parameter(seeded(*shape, seed=n)) for n, (name, shape) in enumerate(shapes.items())}
        for n, param in enumerate(params.values()):
            param.grad = seeded(*param.shape, seed=10 + n)
        muon = MuonConfig(mlp_output_rate=rate, row_beta2=0.9)
        optimizer = optimizer_of({"matrices": params}, OptimConfig(muon=muon))
        optimizer.step({"matrices": settings_of_step(0.1)})
        return {name: param.detach() for name, param in params.items()}, optimizer.state_dict()

    (plain, slots), (faster, faster_slots) = step(1.0), step(4.0)
    for n, (name, shape) in enumerate(shapes.items()):
        if name.endswith("mlp.down"):
            start = seeded(*shape, seed=n)
            assert_close(faster[name] - start, 4 * (plain[name] - start))
        else:
            assert torch.equal(faster[name], plain[name])
    assert set(faster_slots) == set(slots)
    assert all(torch.equal(slot, slots[name]) for name, slot in faster_slots.items())


def test_a_matrix_without_a_gradient_moves_by_its_momentum_alone() -> None:
    params = matrices([(6, 6), (6, 6)])
    start = params["w0"].detach().clone()
    muon = muon_of(params, MuonConfig())
    params["w1"].grad = gradient("w1", params["w1"].shape, 0)
    advance(muon, lr=0.1, momentum=0.9)
    assert torch.equal(params["w0"], start), "no gradient and no momentum: at rest"
    params["w0"].grad = gradient("w0", params["w0"].shape, 1)
    advance(muon, lr=0.1, momentum=0.9)
    params["w0"].grad = None
    before = params["w0"].detach().clone()
    advance(muon, lr=0.1, momentum=0.9)
    expected = -0.1 * orthogonal_factor(gradient("w0", params["w0"].shape, 1))  # momentum is proportional to it
    assert_close(params["w0"].detach() - before, expected, rtol=0, atol=1e-6)


def test_bf16_weights_have_fp32_momentum() -> None:
    param = nn.Parameter(seeded(4, 4, seed=0).bfloat16())
    muon = muon_of({"w": param}, MuonConfig())
    param.grad = seeded(4, 4, seed=1).bfloat16()
    advance(muon, lr=0.1, momentum=0.9)
    assert muon.stacks[0].momentum.dtype == torch.float32
    assert_close(muon.stacks[0].momentum[0], param.grad.float() * (1 - 0.9))
