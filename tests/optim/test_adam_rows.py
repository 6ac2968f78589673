"""Adam by rows: the lazy sparse update against a dense one in float64, and its place in the optimizer."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from model.small import in_fp32, random_tokens, shaken, small, windows
from optim.building import Params, float64_iteration, optimizer_of, settings_of
from optim.building import settings as settings_of_step
from optim.oracles import adam_rows_step
from paceline.kernels.row_gradients import RowGradients, look_up_rows
from paceline.optim.optimizer import Optimizer
from paceline.optim.rule import Event, RuleContext
from paceline.optim.rules.adam_rows import FACTS, Rule
from paceline.settings.groups import ParamGroup, param_groups
from paceline.settings.optim import GroupConfig, OptimConfig

ROWS, WIDTH, EVENTS, BETA2 = 60, 5, 20, 0.95
CONFIG = OptimConfig(groups=(GroupConfig(name="ngrams", rule="adam_rows", lr=0.1),))


def group_of(config: OptimConfig = CONFIG) -> ParamGroup:
    return param_groups(config, ["ngrams"])["ngrams"]


def events(seed: int = 0) -> Iterator[tuple[Tensor, Tensor, float]]:
    """For each event the tokens it looks up, with repetitions, a gradient for each, and a rate. Some rows are looked up
    at almost every event, some now and then, the last ten never."""
    generator = torch.Generator().manual_seed(seed)
    for event in range(EVENTS):
        tokens = torch.randint(0, ROWS - 10, (12,), generator=generator)
        tokens[:4] = torch.randint(0, 3, (4,), generator=generator)
        yield tokens, torch.randn(12, WIDTH, generator=generator), 0.2 - 0.005 * event


def table(dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(9)).to(dtype))


def rule_of(param: nn.Parameter) -> Rule:
    return Rule(group_of(), {"w": param}, RuleContext(orthogonalise=float64_iteration))


def dense(tokens: Tensor, grads: Tensor) -> Tensor:
    return torch.zeros(ROWS, WIDTH, dtype=torch.float64).index_add_(0, tokens, grads.double())


@pytest.mark.parametrize("decay", [0.0, 0.3])
@pytest.mark.parametrize("beta2", [0.0, 0.5, BETA2])
def test_the_lazy_update_is_a_dense_one_without_a_first_moment(beta2: float, decay: float) -> None:
    """Untouched rows decay their second moment when they are next touched, by all that they have missed."""
    param, square = table(), torch.zeros(ROWS, dtype=torch.float64)
    rule, expected = rule_of(param), param.detach().double()
    for number, (tokens, grads, lr) in enumerate(events(), start=1):
        settings = settings_of_step(lr, beta2=beta2, eps=1e-3, weight_decay=decay)
        rule.start(Event(settings=settings, step=number, rows={"w": (tokens, grads)}))()
        expected, square = adam_rows_step(
            expected, dense(tokens, grads), square, t=number, lr=lr, beta2=beta2, eps=1e-3, decay=decay
        )
        assert_close(param.detach().double(), expected, rtol=1e-5, atol=1e-5)  # fp32 arithmetic over 20 updates
    touched = rule.state()["adam_rows.last.w"].kept() == EVENTS
    assert touched.any()
    assert_close(rule.state()["adam_rows.square.w"].kept()[touched].double(), square[touched], rtol=1e-5, atol=1e-7)


def test_rows_that_no_token_looked_up_keep_every_bit() -> None:
    param = table()
    rule = rule_of(param)
    for number, (tokens, grads, lr) in enumerate(events(), start=1):
        before = {name: slot.kept().clone() for name, slot in rule.state().items()}
        weights, missed = param.detach().clone(), torch.ones(ROWS, dtype=torch.bool)
        missed[tokens] = False
        settings = settings_of_step(lr, weight_decay=0.5)
        rule.start(Event(settings=settings, step=number, rows={"w": (tokens, grads)}))()
        assert torch.equal(param[missed], weights[missed])
        assert not torch.equal(param[~missed], weights[~missed])
        for name, slot in rule.state().items():
            assert torch.equal(slot.kept()[missed], before[name][missed]), name


def test_a_bf16_table_is_moved_in_fp32_and_rounded_once() -> None:
    param, (tokens, grads, lr) = table(torch.bfloat16), next(events())
    exact, _ = adam_rows_step(
        param.detach(), dense(tokens, grads), torch.zeros(ROWS), t=1, lr=lr, beta2=BETA2, eps=1e-8, decay=0.1
    )
    rule = rule_of(param)
    rule.start(Event(settings=settings_of_step(lr, weight_decay=0.1), step=1, rows={"w": (tokens, grads)}))()
    assert param.dtype == torch.bfloat16
    assert_close(param.detach().double(), exact, rtol=1.01 * 2**-8, atol=1e-5)  # half a bf16 step and fp32 noise
    assert {slot.dtype for slot in rule.state().values()} == {torch.float32, torch.int32}


def test_the_decay_never_acts_against_the_update() -> None:
    """Rows whose gradient pulls their weights away from zero are not pulled back."""
    param = nn.Parameter(torch.tensor([[1.0, -1.0, 1.0, -1.0], [1.0, -1.0, 1.0, -1.0]]))
    grads = torch.tensor([[1.0, -1.0, -1.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    settings = settings_of_step(0.1, beta2=0.0, weight_decay=2.0)
    rule_of(param).start(Event(settings=settings, step=1, rows={"w": (torch.arange(2), grads)}))()
    assert_close(param[0].detach(), torch.tensor([0.7, -0.7, 1.1, -1.1]))
    assert param[1].tolist() == [1.0, -1.0, 1.0, -1.0]


# ---- in the optimizer


class Run:
    """A table by rows and a dense vector, which share one optimizer and one loss."""

    def __init__(self, config: OptimConfig = CONFIG) -> None:
        self.table, self.gain = table(), nn.Parameter(torch.ones(WIDTH))
        self.store = RowGradients(16, WIDTH, torch.float32)
        params: Params = {"ngrams": {"w": self.table}, "scalars": {"gain": self.gain}}
        self.optimizer: Optimizer = optimizer_of(params, config, row_gradients={"w": self.store})

    def gradient(self, tokens: Tensor, grads: Tensor) -> None:
        (look_up_rows(tokens, self.table, self.store) * self.gain).backward(grads)

    def step(self, number: int, *, skip: bool | None = None, scale: float = 1.0) -> None:
        tokens, grads, _ = list(events())[number]
        self.optimizer.zero_grad()
        self.gradient(tokens, scale * grads)
        settings = settings_of(self.optimizer, lr_scale=1.0 - 0.02 * number)
        self.optimizer.step(settings, skip=None if skip is None else torch.tensor(skip))

    def everything(self) -> dict[str, Tensor]:
        return {"table": self.table.detach().clone(), "gain": self.gain.detach().clone(), **self.optimizer.state_dict()}

    def take(self, other: "Run") -> None:
        self.table.data.copy_(other.table)
        self.gain.data.copy_(other.gain)
        self.optimizer.load_state_dict(other.optimizer.state_dict())


def same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_the_norm_of_all_gradients_is_that_of_the_summed_rows() -> None:
    """Token by token it would be another: a row that was looked up twice has the sum of two gradients."""
    run = Run()
    tokens, grads, _ = next(events())
    run.gradient(tokens, grads)
    assert run.gain.grad is not None
    exact = torch.cat([dense(tokens, grads * run.gain.detach()).flatten(), run.gain.grad.double()]).norm()
    assert float(run.optimizer.gradient_norm()) == pytest.approx(float(exact), rel=1e-6)
    assert len(set(tokens.tolist())) < len(tokens)


@pytest.mark.parametrize("clip_norm", [0.5, 1e6])  # far below and far above the gradient's norm
def test_clipping_scales_rows_and_dense_gradients_by_one_factor(clip_norm: float) -> None:
    """With a large ε an update knows the size of its gradient."""
    groups = (GroupConfig(name="ngrams", rule="adam_rows", lr=0.1, eps=10.0), GroupConfig(name="scalars", eps=10.0))
    config = OptimConfig(groups=groups)
    clipped, scaled = Run(replace(config, clip_norm=clip_norm)), Run(config)
    tokens, grads, _ = next(events())
    scaled.gradient(tokens, grads)
    factor = min(1.0, clip_norm / (float(scaled.optimizer.gradient_norm()) + 1e-6))
    clipped.step(0)
    scaled.step(0, scale=factor)
    assert_close(clipped.table, scaled.table, rtol=1e-6, atol=1e-6)
    assert_close(clipped.gain, scaled.gain, rtol=1e-6, atol=1e-6)


def test_a_skipped_event_changes_nothing_whatever_the_rows_hold() -> None:
    run = Run()
    run.step(0, skip=False)
    before = run.everything()
    run.step(1, skip=True, scale=float("nan"))
    assert same_bits(run.everything(), before)


def test_after_a_skipped_event_it_goes_on_as_if_that_had_not_been() -> None:
    """Neither the bias correction nor the events that a row has missed count it, also after a load."""
    guarded, plain, resumed = Run(), Run(), Run()
    for number, skip in ((0, False), (7, True), (1, False), (8, True)):
        guarded.step(number, skip=skip, scale=float("inf") if skip else 1.0)
    for number in (0, 1):
        plain.step(number)
    resumed.take(guarded)
    for run in (guarded, plain, resumed):
        for number in (2, 3):
            run.step(number, skip=False)
    assert same_bits(guarded.everything(), plain.everything())
    assert same_bits(resumed.everything(), plain.everything())


def test_an_event_that_is_not_skipped_is_the_event_without_a_flag() -> None:
    guarded, plain = Run(), Run()
    for number in range(5):
        guarded.step(number, skip=False)
        plain.step(number)
    assert same_bits(guarded.everything(), plain.everything())


def test_continuing_from_a_saved_state_is_bit_equal() -> None:
    whole, first, second = Run(), Run(), Run()
    for number in range(EVENTS):
        whole.step(number)
        if number < EVENTS // 2:
            first.step(number)
    second.take(first)
    for number in range(EVENTS // 2, EVENTS):
        second.step(number)
    assert same_bits(second.everything(), whole.everything())


def test_slots_exist_before_the_first_step_and_take_8_bytes_a_row() -> None:
    state = Run().optimizer.state_dict()
    mine = {name: tensor for name, tensor in state.items() if name.startswith("adam_rows.")}
    assert mine.keys() == {"adam_rows.square.w", "adam_rows.last.w"}
    assert not any(tensor.any() for tensor in mine.values())
    assert sum(tensor.nbytes for tensor in mine.values()) == FACTS.slot_bytes((ROWS, WIDTH), 4) == 8 * ROWS


def test_zero_grad_forgets_the_rows_too() -> None:
    run = Run()
    tokens, grads, _ = next(events())
    run.gradient(tokens, grads)
    assert float(run.optimizer.gradient_norm()) > 0
    run.optimizer.zero_grad()
    assert int(run.store.count) == 0
    assert float(run.optimizer.gradient_norm()) == 0


def test_a_model_trains_its_value_tables_by_rows() -> None:
    """Three steps in two micro-batches against the float64 update by the dense gradients of a twin."""
    lr, config = 0.05, replace(in_fp32(small("r18-softcap")), num_layers=4, value_ends=1, layers_without_attention=())
    model, name = shaken(config), "embeddings.values.0"
    params = model.parameter_groups()
    weights = params["value_embeddings"][name]
    store = RowGradients(256, weights.size(1), weights.dtype)
    model.keep_row_gradients(name, store)
    rule = GroupConfig(name="value_embeddings", rule="adam_rows", lr=lr)
    optimizer = optimizer_of(params, OptimConfig(groups=(rule,)), row_gradients={name: store})
    exact, square = weights.detach().double(), torch.zeros(len(weights), dtype=torch.float64)
    for step in range(3):
        tokens = random_tokens(2, 128, seed=step)
        twin = shaken(config)
        twin.load_state_dict(model.state_dict())
        twin(tokens, tokens.roll(-1, dims=1), windows(128)).main.sum().backward()
        optimizer.zero_grad()
        for row in tokens.split(1):
            model(row, row.roll(-1, dims=1), windows(128)).main.sum().backward()
        optimizer.step(settings_of(optimizer))
        gradient = twin.get_parameter(name).grad
        assert gradient is not None
        exact, square = adam_rows_step(exact, gradient, square, t=step + 1, lr=lr, beta2=BETA2, eps=1e-8, decay=0.0)
        touched = torch.zeros(len(weights), dtype=torch.bool)
        touched[tokens.flatten()] = True
        assert_close(weights.detach().double()[touched], exact[touched], rtol=1e-3, atol=1e-3 * lr)  # fp32 gradients
    never = ~torch.isin(torch.arange(len(weights)), torch.cat([random_tokens(2, 128, seed=s) for s in range(3)]))
    assert torch.equal(weights[never], shaken(config).get_parameter(name)[never])
