"""The Optimizer as the training loop sees it: every group by its rule, its state as a value, every switch alive."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from optim import building
from optim.building import Params, settings_of
from optim.oracles import muon_steps
from paceline.backends.registry import Request, find
from paceline.core.errors import RunError
from paceline.optim.optimizer import Optimizer
from paceline.optim.rule import Orthogonalise, ParamSync, global_norm
from paceline.settings.model import ModelConfig
from paceline.settings.optim import AdamConfig, MuonConfig, OptimConfig
from paceline.train.diagnostics import update_ratios

CONFIG = OptimConfig(muon=MuonConfig(weight_decay=0.02), adam=AdamConfig(weight_decay=0.01))
PARTS = {"b0.qkv": (8, 8, 8)}


def seeded(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def model() -> Params:
    """A parameter of every group, with bf16 tables, a 0-D scalar and a fused matrix."""
    shapes = {"b0.qkv": (24, 8), "b0.out": (8, 8), "b1.fc": (16, 8), "b1.proj": (8, 16)}
    matrices = {name: nn.Parameter(seeded(*shape, seed=i)) for i, (name, shape) in enumerate(shapes.items())}
    return {
        "matrices": matrices,
        "embeddings": {"table": nn.Parameter(seeded(40, 8, seed=10).bfloat16())},
        "value_embeddings": {"values": nn.Parameter(seeded(40, 4, seed=11).bfloat16())},
        "lm_head": {"head": nn.Parameter(torch.zeros(40, 8))},
        "scalars": {"gate": nn.Parameter(torch.tensor(0.5)), "mix": nn.Parameter(torch.tensor([1.0, 0.0]))},
    }


def flat(params: Params) -> dict[str, nn.Parameter]:
    return {name: param for named in params.values() for name, param in named.items()}


def set_grads(params: Params, step: int) -> None:
    for index, param in enumerate(flat(params).values()):
        param.grad = seeded(*param.shape, seed=100 * (step + 1) + index).to(param)


def optimizer_of(params: Params, config: OptimConfig = CONFIG, **changes: object) -> Optimizer:
    return building.optimizer_of(params, config, **{"parts": PARTS, **changes})  # type: ignore[arg-type]


def step_once(optimizer: Optimizer, *, lr_scale: float = 1.0, momentum: float = 0.9) -> None:
    optimizer.step(settings_of(optimizer, lr_scale=lr_scale, momentum=momentum))


def advance(params: Params, optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        set_grads(params, step)
        step_once(optimizer, lr_scale=1.0 - 0.1 * step, momentum=0.85 + 0.01 * step)


def trained(config: OptimConfig = CONFIG, steps: int = 3, **changes: object) -> dict[str, Tensor]:
    params = model()
    advance(params, optimizer_of(params, config, **changes), range(steps))
    return {name: param.detach() for name, param in flat(params).items()}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_each_adam_group_moves_at_its_own_rate() -> None:
    """Adam's first step is lr times the sign of the gradient."""
    adam = AdamConfig(embedding_lr=0.5, lm_head_lr=0.25, scalar_lr=0.125, matrix_lr=0.0625)
    params = model()
    optimizer = optimizer_of(params, OptimConfig(matrices="adamw", adam=adam))
    before = {name: param.detach().clone() for name, param in flat(params).items()}
    set_grads(params, 0)
    step_once(optimizer, lr_scale=0.5)
    rates = {"embeddings": 0.5, "value_embeddings": 0.5, "lm_head": 0.25, "scalars": 0.125, "matrices": 0.0625}
    for group, lr in rates.items():
        for name, param in params[group].items():
            expected = before[name] - 0.5 * lr * param.grad.sign()
            assert_close(param.detach(), expected, rtol=1e-5 if param.dtype == torch.float32 else 2**-7, atol=1e-6)


@pytest.mark.parametrize("form", ["sum", "average"])
@pytest.mark.parametrize("rule", ["longest_side", "aspect"])
@pytest.mark.parametrize("association", ["polynomial_first", "product_first"])
def test_matrices_follow_muon(form: str, rule: str, association: str) -> None:
    muon = MuonConfig(lr=0.04, momentum_form=form, scale_rule=rule, ns_association=association, weight_decay=0.5)
    moved = trained(OptimConfig(muon=muon))["b1.fc"]
    start, grads = model()["matrices"]["b1.fc"].detach(), []
    for step in range(3):
        params = model()
        set_grads(params, step)
        grads.append(params["matrices"]["b1.fc"].grad.double())
    lrs, momenta = [0.04 * (1 - 0.1 * step) for step in range(3)], [0.85, 0.86, 0.87]
    expected = muon_steps(start, grads, lrs=lrs, momenta=momenta, form=form, rule=rule, decay=0.5)
    assert_close(moved.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("muon", {"lr": 0.01}),
        ("muon", {"momentum_form": "sum"}),
        ("muon", {"scale_rule": "longest_side"}),
        ("muon", {"ns_steps": 3}),
        ("muon", {"ns_association": "product_first"}),
        ("muon", {"weight_decay": 0.1}),
        ("adam", {"embedding_lr": 0.1}),
        ("adam", {"lm_head_lr": 0.1}),
        ("adam", {"scalar_lr": 0.1}),
        ("adam", {"beta1": 0.5}),
        ("adam", {"beta2": 0.5}),
        ("adam", {"eps": 0.1}),
        ("adam", {"weight_decay": 0.1}),
    ],
    ids=str,
)
def test_every_switch_is_alive(part: str, change: dict[str, object]) -> None:
    plain = OptimConfig()
    changed = replace(plain, **{part: replace(getattr(plain, part), **change)})
    assert not equal(trained(plain), trained(changed))


@pytest.mark.parametrize(
    ("asked", "available", "expected"),
    [("bf16", True, "bfloat16"), ("bf16", False, "float32"), ("fp32", True, "float32"), ("fp32", False, "float32")],
)
def test_bf16_products_need_both_the_setting_and_the_device(asked: str, available: bool, expected: str) -> None:
    seen = []

    def look(iteration: Orthogonalise, stacks: list[Tensor], _: object) -> list[Tensor]:
        assert isinstance(iteration, partial)
        seen.append(iteration.keywords["dtype"])  # looked at, not run: this CPU may die of a bf16 product
        return [torch.zeros_like(stack) for stack in stacks]

    trained(OptimConfig(muon=MuonConfig(ns_dtype=asked)), 1, bf16_products=available, share_work=look)
    assert seen == [getattr(torch, expected)]


@pytest.mark.parametrize("norm_of", ["rounded", "unrounded"])
def test_the_side_of_the_norm_reaches_the_iteration(norm_of: str) -> None:
    def look(iteration: Orthogonalise, stacks: list[Tensor], _: object) -> list[Tensor]:
        assert isinstance(iteration, partial)
        assert iteration.keywords["norm_of"] == norm_of
        return [torch.zeros_like(stack) for stack in stacks]

    trained(OptimConfig(muon=MuonConfig(ns_norm_of=norm_of)), 1, share_work=look)


def test_a_rate_of_zero_moves_nothing() -> None:
    params = model()
    before = {name: param.detach().clone() for name, param in flat(params).items()}
    set_grads(params, 0)
    step_once(optimizer_of(params), lr_scale=0.0)
    assert equal(before, {name: param.detach() for name, param in flat(params).items()})


def test_decay_shrinks_weights_apart_from_the_gradient() -> None:
    """Without gradients only the decay acts: 1 - lr·wd in every group, whatever the shape factor."""
    params = model()
    before = {name: param.detach().double() for name, param in flat(params).items()}
    muon, adam = MuonConfig(lr=0.5, weight_decay=0.2), AdamConfig(embedding_lr=0.4, scalar_lr=0.3, weight_decay=0.1)
    step_once(optimizer_of(params, OptimConfig(muon=muon, adam=adam)), lr_scale=0.5)
    for group, factor in (("matrices", 1 - 0.25 * 0.2), ("embeddings", 1 - 0.2 * 0.1), ("scalars", 1 - 0.15 * 0.1)):
        for name, param in params[group].items():
            rtol = 2**-8 if param.dtype == torch.bfloat16 else 1e-6
            assert_close(param.detach().double(), before[name] * factor, rtol=rtol, atol=0)


@pytest.mark.parametrize("clip_norm", [0.5, 1e6])  # far below and far above the gradient's norm
def test_clipping_is_that_of_torch(clip_norm: float) -> None:
    ours = model()
    set_grads(ours, 0)
    theirs = {name: nn.Parameter(param.detach().float()) for name, param in flat(ours).items()}
    for name, param in flat(ours).items():
        theirs[name].grad = param.grad.float().clone()  # of bf16 gradients torch would round the norm
    torch.nn.utils.clip_grad_norm_(theirs.values(), clip_norm)
    step_once(optimizer_of(ours, replace(CONFIG, clip_norm=clip_norm)))
    for name, param in flat(ours).items():
        rtol = 2**-8 if param.dtype == torch.bfloat16 else 1e-6  # bf16: the product is rounded once
        assert_close(param.grad.float(), theirs[name].grad, rtol=rtol, atol=1e-9)
    if clip_norm == 0.5:
        assert_close(global_norm([param.grad for param in flat(ours).values()]), torch.tensor(0.5), rtol=1e-3, atol=0)


def test_gradient_norm_is_that_of_one_long_vector() -> None:
    params = model()
    optimizer = optimizer_of(params)
    assert optimizer.gradient_norm() == 0, "no gradients yet"
    set_grads(params, 0)
    params["lm_head"]["head"].grad = None
    long = torch.cat([param.grad.double().flatten() for param in flat(params).values() if param.grad is not None])
    assert_close(optimizer.gradient_norm().double(), long.norm(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("matrices", ["muon", "adamw"])
def test_continuing_from_a_saved_state_is_bit_equal(matrices: str) -> None:
    config = replace(CONFIG, matrices=matrices)
    whole, first_half, second_half = model(), model(), model()
    advance(whole, optimizer_of(whole, config), range(6))
    first = optimizer_of(first_half, config)
    advance(first_half, first, range(3))
    second = optimizer_of(second_half, config)
    for name, param in flat(second_half).items():
        param.data.copy_(flat(first_half)[name])
    second.load_state_dict(first.state_dict())
    advance(second_half, second, range(3, 6))
    for name, param in flat(whole).items():
        assert torch.equal(param, flat(second_half)[name])
    assert second.steps_taken == 6


def test_state_moves_between_stackings() -> None:
    """Slots are named per parameter: an optimizer that lists its matrices in another order reads the same state."""
    params, turned = model(), model()
    turned["matrices"] = dict(reversed(turned["matrices"].items()))
    first, second = optimizer_of(params), optimizer_of(turned)
    advance(params, first, range(3))
    second.load_state_dict(first.state_dict())
    assert equal(first.state_dict(), second.state_dict())


class SecondHalf(ParamSync):
    """The second of two processes, each with the state of half of every parameter's rows; of the first it knows 0."""

    def rows(self, param: Tensor) -> slice:
        return slice(len(param) // 2, None)

    def own(self, param: Tensor, of: Tensor) -> Tensor:
        return of[self.rows(param)]

    def whole(self, own: Tensor, param: Tensor) -> Tensor:
        return torch.cat([torch.zeros_like(own), own])


def test_a_process_that_keeps_some_rows_goes_on_from_the_state_of_all() -> None:
    """And refuses one of its own rows only: a checkpoint has the whole, however many processes read it."""
    whole, half = ({"embeddings": {"table": nn.Parameter(seeded(6, 4, seed=1))}} for _ in range(2))
    all_rows, some_rows = optimizer_of(whole, parts={}), optimizer_of(half, parts={}, sync=SecondHalf())
    advance(whole, all_rows, range(2))
    half["embeddings"]["table"].data.copy_(whole["embeddings"]["table"])
    some_rows.load_state_dict(all_rows.state_dict())
    own, theirs = (
        {name: slot[3:] if slot.dim() else slot for name, slot in each.state_dict().items()}
        for each in (some_rows, all_rows)
    )
    assert equal(own, theirs)
    for params, optimizer in ((whole, all_rows), (half, some_rows)):
        advance(params, optimizer, range(2, 4))
    mine, judge = (each["embeddings"]["table"].detach()[3:] for each in (half, whole))
    assert_close(mine, judge, rtol=1e-6, atol=1e-7)  # the kernel's vectors begin at other elements
    with pytest.raises(RunError, match=r"exp_avg\.table is torch.float32 \(3, 4\), but this run needs .* \(6, 4\)"):
        some_rows.load_state_dict(own)


def test_slots_exist_before_the_first_step() -> None:
    state = optimizer_of(model()).state_dict()
    muon = {f"muon.momentum.{name}" for name in ("b0.qkv", "b0.out", "b1.fc", "b1.proj")}
    by_adam = ("table", "values", "head", "gate", "mix")
    adam = {f"adam.{slot}.{name}" for slot in ("exp_avg", "exp_avg_sq") for name in by_adam}
    assert set(state) == {"step"} | muon | adam
    assert all(not tensor.any() for tensor in state.values())
    assert state["muon.momentum.b0.qkv"].shape == (24, 8)
    assert state["adam.exp_avg.table"].dtype == torch.bfloat16
    assert len({tensor.untyped_storage().data_ptr() for tensor in state.values()}) == len(state), "nothing is shared"


def test_state_dict_is_a_value() -> None:
    params = model()
    optimizer = optimizer_of(params)
    advance(params, optimizer, range(2))
    state = optimizer.state_dict()
    copy = {name: tensor.clone() for name, tensor in state.items()}
    advance(params, optimizer, range(2, 4))
    assert equal(state, copy)
    assert not equal(state, optimizer.state_dict())


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda state: state.pop("adam.exp_avg.head"), r"lacks adam.exp_avg.head"),
        (lambda state: state.pop("step"), r"lacks step"),
        (lambda state: state.update({"muon.momentum.ghost": torch.zeros(2)}), r"muon.momentum.ghost"),
        (lambda state: state.update({"muon.momentum.b0.qkv": torch.zeros(8, 24)}), r"\(8, 24\).*needs.*\(24, 8\)"),
        (lambda state: state.update({"adam.exp_avg.table": torch.zeros(40, 8)}), r"float32.*needs torch.bfloat16"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_whole(damage: object, message: str) -> None:
    params = model()
    donor, optimizer = optimizer_of(params), optimizer_of(model())
    advance(params, donor, range(2))
    state, before = donor.state_dict(), optimizer.state_dict()
    damage(state)  # type: ignore[operator]
    with pytest.raises(RunError, match=message):
        optimizer.load_state_dict(state)
    assert equal(before, optimizer.state_dict())


def test_no_gradient_counts_as_a_zero_gradient() -> None:
    absent, zero = model(), model()
    for params in (absent, zero):
        optimizer = optimizer_of(params)
        advance(params, optimizer, range(2))
        set_grads(params, 2)
        for name in ("b0.qkv", "table", "gate"):
            flat(params)[name].grad = None if params is absent else torch.zeros_like(flat(params)[name])
        step_once(optimizer)
    assert equal(dict(flat(absent)), dict(flat(zero)))


def test_zero_grad_leaves_no_gradient() -> None:
    params = model()
    set_grads(params, 0)
    optimizer_of(params).zero_grad()
    assert all(param.grad is None for param in flat(params).values())


def test_a_step_touches_nothing_but_weights_and_state() -> None:
    params = model()
    optimizer = optimizer_of(params)
    set_grads(params, 0)
    grads = {name: param.grad.clone() for name, param in flat(params).items()}
    addresses = {name: param.data_ptr() for name, param in flat(params).items()}
    random_state = torch.get_rng_state()
    step_once(optimizer)
    assert equal(grads, {name: param.grad for name, param in flat(params).items()})
    assert addresses == {name: param.data_ptr() for name, param in flat(params).items()}, "weights stay in place"
    assert torch.equal(random_state, torch.get_rng_state())
    assert torch.is_grad_enabled()


def test_a_measured_step_is_a_step_with_its_size() -> None:
    plain, measured = model(), model()
    before = {group: torch.cat([p.detach().float().flatten() for p in n.values()]) for group, n in plain.items()}
    for params in (plain, measured):
        set_grads(params, 0)
    step_once(optimizer_of(plain))
    optimizer = optimizer_of(measured)
    ratios = update_ratios(optimizer, settings_of(optimizer))
    assert equal(dict(flat(plain)), dict(flat(measured)))
    assert ratios.keys() == plain.keys()
    for group, named in plain.items():
        after = torch.cat([param.detach().float().flatten() for param in named.values()])
        expected = (after - before[group]).norm() / after.norm()
        rtol = 1e-2 if group in ("embeddings", "value_embeddings") else 1e-5  # bf16 differences
        assert_close(ratios[group], expected, rtol=rtol, atol=0)
    assert ratios["lm_head"] == 1, "a head that starts at 0 is all update"


def test_a_measured_group_at_rest_at_zero_gives_zero() -> None:
    optimizer = optimizer_of({"lm_head": {"head": nn.Parameter(torch.zeros(3, 2))}}, parts={})
    assert update_ratios(optimizer, settings_of(optimizer)) == {"lm_head": 0.0}


def test_a_model_without_some_groups_trains() -> None:
    params: Params = {"embeddings": {"table": nn.Parameter(torch.ones(4, 2))}, "scalars": {}}
    optimizer = optimizer_of(params, parts={})
    set_grads(params, 0)
    step_once(optimizer)
    assert not torch.equal(params["embeddings"]["table"], torch.ones(4, 2))
    assert set(optimizer.state_dict()) == {"step", "adam.exp_avg.table", "adam.exp_avg_sq.table"}


def test_a_parameter_in_two_groups_is_refused() -> None:
    """Named, with both groups; so are two of one name, and one under two names in one group."""
    shared, other = nn.Parameter(torch.ones(4, 2)), nn.Parameter(torch.ones(2))
    cases = {
        "head of group 'lm_head' is table of group 'embeddings' as well": {
            "embeddings": {"table": shared}, "lm_head": {"head": shared}
        },
        "w of group 'lm_head' is w of group 'embeddings' as well": {
            "embeddings": {"w": shared}, "lm_head": {"w": other}
        },
        "b of group 'scalars' is a of group 'scalars' as well": {"scalars": {"a": other, "b": other}},
    }  # fmt: skip
    for message, params in cases.items():
        with pytest.raises(ValueError, match=f"parameter {message}; each belongs to one group"):
            optimizer_of(params, parts={})


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_a_gpu_moves_weights_as_a_cpu_does(compiled: bool) -> None:
    """fp32 products on both sides, mixed formats in one group, and a state that was written on a CPU."""
    here, there = model(), model()
    there = {group: {n: nn.Parameter(p.detach().cuda()) for n, p in named.items()} for group, named in there.items()}
    there["scalars"] = {**there["scalars"], "half": nn.Parameter(torch.ones(3, dtype=torch.bfloat16, device="cuda"))}
    here["scalars"] = {**here["scalars"], "half": nn.Parameter(torch.ones(3, dtype=torch.bfloat16))}
    config = replace(CONFIG, clip_norm=1.0)
    request = Request(model=ModelConfig(), device="cuda", compute="bf16", compiled=compiled)
    iteration = find("orthogonalise", "reference").build(request)
    on_cpu, on_gpu = optimizer_of(here, config), optimizer_of(there, config, iteration=iteration)
    advance(here, on_cpu, range(2))
    on_gpu.load_state_dict(on_cpu.state_dict())
    for name, param in flat(there).items():
        param.data.copy_(flat(here)[name])
    advance(here, on_cpu, range(2, 4))
    advance(there, on_gpu, range(2, 4))
    for name, param in flat(there).items():
        step = 2**-7 if param.dtype == torch.bfloat16 else 1e-4  # one bf16 step at the size that the weights had
        assert_close(param.detach().cpu(), flat(here)[name].detach(), rtol=step, atol=step)
