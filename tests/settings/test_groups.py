"""Parameter groups: rules, rates, betas and decay of their own, groups that do not move at every step, and the mistakes
that are refused."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from optim.building import Params, optimizer_of, settings_of
from paceline.core.errors import ConfigError
from paceline.optim.optimizer import Optimizer
from paceline.parallel.machine import checked_groups, inspect_machine
from paceline.parallel.ranks import SINGLE_PROCESS, Ranks
from paceline.recipes.presets import PRESETS, preset
from paceline.settings.groups import ADAM_RATES, own_rules, param_groups
from paceline.settings.optim import AdamConfig, AverageConfig, GroupConfig, MuonConfig, OptimConfig
from paceline.settings.parallel import ParallelConfig
from paceline.settings.run import RunConfig
from paceline.settings.spec import describe

PLAIN = OptimConfig(muon=MuonConfig(weight_decay=0.02), adam=AdamConfig(weight_decay=0.01))
SHAPES = {
    "matrices": (6, 4),
    "embeddings": (9, 4),
    "value_embeddings": (9, 2),
    "lm_head": (9, 4),
    "scalars": (3,),
}
NAMES = tuple(SHAPES)


def with_group(name: str, config: OptimConfig = PLAIN, **changes: Any) -> OptimConfig:
    return replace(config, groups=(GroupConfig(name=name, **changes),))


def optimizer(config: OptimConfig) -> Optimizer:
    generator = torch.Generator().manual_seed(0)
    params: Params = {}
    for group, shape in SHAPES.items():
        tensor = torch.randn(shape, generator=generator)
        params[group] = {group: nn.Parameter(tensor.bfloat16() if group == "embeddings" else tensor)}
    return optimizer_of(params, config)


def gradient(param: Tensor, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * number + param.numel())
    return torch.randn(param.shape, generator=generator).to(param.dtype)


def step(
    subject: Optimizer,
    number: int,
    *,
    grads: tuple[int, ...] | None = None,
    skip: bool | None = None,
    steps: int = 10**6,
) -> None:
    """Step `number` of a run, from 0, by the sum of the gradients of these numbers; by its own, if none are given."""
    for param in subject._all_params():
        param.grad = sum(gradient(param, n) for n in grads or (number,))
        if skip:
            param.grad.view(-1)[0] = torch.nan
    settings = settings_of(subject, lr_scale=1.0 - 0.01 * number, step=number, steps=steps)
    subject.step(settings, skip=None if skip is None else torch.tensor(skip))


def weights(subject: Optimizer) -> dict[str, Tensor]:
    return {group: param.detach().clone() for group, named in subject.groups.items() for param in named.values()}


def everything(subject: Optimizer) -> dict[str, Tensor]:
    return {**weights(subject), **subject.state_dict()}


def resumed(subject: Optimizer, config: OptimConfig) -> Optimizer:
    other = optimizer(config)
    for own, theirs in zip(other._all_params(), subject._all_params(), strict=True):
        own.data.copy_(theirs.data)
    other.load_state_dict(subject.state_dict())
    return other


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> set[str]:
    assert one.keys() == other.keys()
    return {name for name in one if not torch.equal(one[name], other[name])}


# ---- settings of one group


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("embeddings", {"lr": 0.1}),
        ("value_embeddings", {"beta1": 0.5}),
        ("lm_head", {"beta2": 0.5}),
        ("scalars", {"eps": 0.1}),
        ("lm_head", {"weight_decay": 0.3}),
        ("matrices", {"lr": 0.01}),
        ("matrices", {"weight_decay": 0.3}),
        ("matrices", {"rule": "adam"}),
        ("lm_head", {"rule": "muon"}),
        ("scalars", {"every": 2}),
    ],
    ids=str,
)
def test_a_change_of_one_group_acts_on_that_group_only(name: str, change: dict[str, Any]) -> None:
    plain, changed = optimizer(PLAIN), optimizer(with_group(name, **change))
    for number in range(3):
        step(plain, number)
        step(changed, number)
    assert differing(weights(plain), weights(changed)) == {name}


def test_what_a_group_does_not_state_it_takes_from_muon_and_adam() -> None:
    config = replace(PLAIN, groups=(GroupConfig(name="lm_head", beta1=0.5), GroupConfig(name="matrices", every=2)))
    groups = param_groups(config, NAMES)
    assert list(groups) == sorted(NAMES)
    assert {name: group.rule for name, group in groups.items()} == {**dict.fromkeys(NAMES, "adam"), "matrices": "muon"}
    adam = config.adam
    for name, group in groups.items():
        expected = config.muon.lr if name == "matrices" else getattr(adam, ADAM_RATES[name])
        assert group.lr == expected
        assert group.weight_decay == (0.02 if name == "matrices" else 0.01)
        assert (group.beta1, group.beta2, group.eps) == (0.5 if name == "lm_head" else adam.beta1, adam.beta2, adam.eps)
        assert group.every == (2 if name == "matrices" else 1)


def test_adam_as_the_rule_of_the_matrices_is_the_setting_of_that_name() -> None:
    by_group, by_setting = optimizer(with_group("matrices", rule="adam")), optimizer(replace(PLAIN, matrices="adamw"))
    for number in range(3):
        step(by_group, number)
        step(by_setting, number)
    assert not differing(everything(by_group), everything(by_setting))


def test_vectors_and_scalars_do_not_decay_if_only_matrices_shall() -> None:
    adam = AdamConfig(weight_decay=0.1, decay_vectors=False)
    groups = param_groups(OptimConfig(matrices="adamw", adam=adam), [*NAMES, "vectors"])
    assert {name for name, group in groups.items() if group.weight_decay == 0.0} == {"scalars", "vectors"}
    assert {group.weight_decay for name, group in groups.items() if name not in ("scalars", "vectors")} == {0.1}
    stated = OptimConfig(adam=adam, groups=(GroupConfig(name="vectors", weight_decay=0.2),))
    assert param_groups(stated, ["vectors"])["vectors"].weight_decay == 0.2


def test_a_new_group_is_moved_by_the_rule_and_rate_that_its_entry_states() -> None:
    config = with_group("ngrams", rule="adam", lr=0.25)
    param = nn.Parameter(torch.zeros(4, 2))
    subject = optimizer_of({"ngrams": {"w": param}}, config)
    param.grad = torch.ones(4, 2)
    subject.step(settings_of(subject))
    assert torch.allclose(param, torch.full((4, 2), -0.25), atol=1e-6), "Adam's first step is its rate"


def test_settings_of_a_step_carry_the_scale_and_the_momentum() -> None:
    found = param_groups(PLAIN, ["matrices"])["matrices"].settings(7, 10, 0.5, 0.91)
    assert (found.lr, found.momentum, found.weight_decay, found.moves) == (0.5 * PLAIN.muon.lr, 0.91, 0.02, True)


def test_an_update_crosses_memory_with_what_it_reads_and_writes() -> None:
    """A bf16 table of 1,000 rows of 16, of which 10 tokens looked up a row each."""
    whole = 1000 * 16 * 2
    assert own_rules()["adam"].crossed_bytes((1000, 16), 2, 10) == 3 * whole + 2 * 2 * whole  # and both moments
    row, state, index, summed = 16 * 2, 8, 8, 2 * 16 * 4
    by_rows = 2 * 10 * (row + state + index + row + summed)  # each read once and written once
    assert own_rules()["adam_rows"].crossed_bytes((1000, 16), 2, 10) == by_rows == 4160


# ---- every so many steps


@pytest.mark.parametrize("every", [2, 3])
@pytest.mark.parametrize("name", ["matrices", "embeddings", "scalars"])
def test_a_group_moves_at_every_nth_step_by_the_sum_of_the_gradients_since(name: str, every: int) -> None:
    """As an optimizer that takes only those steps, by the summed gradients: the same bits, moments and counters."""
    lazy, judge = optimizer(with_group(name, every=every)), optimizer(PLAIN)
    for move in range(3):
        numbers = tuple(range(every * move, every * move + every))
        for number in numbers:
            before = weights(lazy)
            step(lazy, number)
            assert (name in differing(weights(lazy), before)) == (number == numbers[-1])
        step(judge, numbers[-1], grads=numbers)
    assert torch.equal(weights(lazy)[name], weights(judge)[name])


def test_the_last_step_of_a_run_moves_whatever_is_left() -> None:
    group = param_groups(with_group("scalars", every=4), NAMES)["scalars"]
    assert [group.settings(n, 10, 1.0, 0.9).moves for n in range(10)] == [n in (3, 7, 9) for n in range(10)]
    lazy, judge = optimizer(with_group("scalars", every=4)), optimizer(PLAIN)
    for number in range(6):
        step(lazy, number, steps=6)
    step(judge, 3, grads=(0, 1, 2, 3))
    step(judge, 5, grads=(4, 5))
    assert torch.equal(weights(lazy)["scalars"], weights(judge)["scalars"])


@pytest.mark.parametrize("name", ["matrices", "embeddings", "scalars"])
@pytest.mark.parametrize("stop", [1, 2, 3])
def test_a_run_resumed_between_two_moves_is_bit_equal(name: str, stop: int) -> None:
    config = with_group(name, every=2)
    whole, first = optimizer(config), optimizer(config)
    for number in range(6):
        step(whole, number)
    for number in range(stop):
        step(first, number)
    waiting = first.state_dict()[f"pending.{name}"]
    assert bool(waiting.any()) == (stop % 2 == 1), "a checkpoint holds the gradients that wait"
    second = resumed(first, config)
    for number in range(stop, 6):
        step(second, number)
    assert not differing(everything(whole), everything(second))


@pytest.mark.parametrize("name", ["matrices", "embeddings", "scalars"])
def test_a_skipped_step_drops_its_gradient_and_keeps_those_before_it(name: str) -> None:
    """Steps 0, 1 and 2 of three: the middle one is skipped, whatever it holds."""
    config = with_group(name, every=3)
    guarded, judge = optimizer(config), optimizer(config)
    for number, skip in ((0, False), (1, True), (2, False)):
        before = everything(guarded)
        step(guarded, number, skip=skip)
        if skip:
            assert not differing(everything(guarded), before), "weights, slots and what waits"
    for number, used in ((0, 0), (1, None), (2, 2)):
        for param in judge._all_params():
            param.grad = torch.zeros_like(param) if used is None else gradient(param, used)
        judge.step(settings_of(judge, lr_scale=1.0 - 0.01 * number, step=number))
    assert torch.equal(weights(guarded)[name], weights(judge)[name])


@pytest.mark.parametrize("name", ["matrices", "embeddings", "scalars"])
def test_a_skipped_move_leaves_weights_and_slots_and_drops_what_was_left_for_it(name: str) -> None:
    config = with_group(name, every=2)
    guarded = optimizer(config)
    step(guarded, 0, skip=False)
    before = everything(guarded)
    step(guarded, 1, skip=True)
    changed = differing(everything(guarded), before)
    assert changed == {f"pending.{name}"}
    assert not guarded.state_dict()[f"pending.{name}"].any()


def test_a_run_resumed_between_two_skipped_steps_is_bit_equal() -> None:
    """The bias correction of Adam counts the same updates, wherever the skips and the checkpoint fall."""
    config = with_group("scalars", every=2)
    for stop in range(1, 8):
        whole, first = optimizer(config), optimizer(config)
        skips = {0, 3}
        for number in range(8):
            step(whole, number, skip=number in skips)
        for number in range(stop):
            step(first, number, skip=number in skips)
        second = resumed(first, config)
        for number in range(stop, 8):
            step(second, number, skip=number in skips)
        assert not differing(everything(whole), everything(second)), stop


def test_a_group_that_waits_is_clipped_step_by_step() -> None:
    """The norm of a step is that of its own gradients, not of what is left from others."""
    config = replace(with_group("scalars", every=2), clip_norm=1e-3)
    subject, judge = optimizer(config), optimizer(config)
    step(subject, 0)
    for param in subject._all_params():
        param.grad = gradient(param, 1)
    for param in judge._all_params():
        param.grad = gradient(param, 1)
    assert torch.equal(subject.gradient_norm(), judge.gradient_norm())


# ---- mistakes


def message_of(config: OptimConfig, names: tuple[str, ...] = NAMES) -> str:
    with pytest.raises(ConfigError) as refused:
        param_groups(config, names)
    return one_line(refused.value)


def one_line(error: Exception) -> str:
    assert "\n" not in str(error)
    assert str(error).startswith("optim.groups: ")
    return str(error)


def test_a_group_without_a_rule_or_a_rate_is_refused() -> None:
    assert "group 'heads' has no rule" in message_of(PLAIN, (*NAMES, "heads"))
    assert "group 'heads' has no lr" in message_of(with_group("heads", rule="adam"), (*NAMES, "heads"))


def test_a_group_that_the_model_has_not_is_refused_with_those_that_it_has() -> None:
    message = message_of(with_group("heads", lr=0.1))
    assert "'heads' is no group of this model; there are embeddings, lm_head, matrices, scalars" in message


def test_a_group_named_twice_is_refused() -> None:
    groups = (GroupConfig(name="lm_head", lr=0.1), GroupConfig(name="lm_head", beta1=0.5))
    assert "a group is named twice" in message_of(replace(PLAIN, groups=groups))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lr": -0.1}, "lr -0.1 of 'lm_head' must be a number of at least 0"),
        ({"weight_decay": float("inf")}, "weight_decay inf of 'lm_head'"),
        ({"eps": float("nan")}, "eps nan of 'lm_head'"),
        ({"beta1": 1.0}, r"beta1 1.0 of 'lm_head' is outside [0, 1)"),
        ({"beta2": -0.5}, r"beta2 -0.5 of 'lm_head' is outside [0, 1)"),
        ({"every": 0}, "every 0 of 'lm_head' must be at least 1"),
        ({"rule": "../os"}, "'../os' is no rule's name"),
    ],
)
def test_a_number_that_cannot_work_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        GroupConfig(name="lm_head", **change)
    assert message in one_line(refused.value)


def test_a_run_is_refused_when_its_config_is_made() -> None:
    config = preset("r18-softcap")
    with pytest.raises(ConfigError, match="'heads' is no group of this model"):
        replace(config, optim=with_group("heads", config.optim, lr=0.1))
    with pytest.raises(ConfigError, match=r"optim\.groups: rule 'sgd' does not exist; there are adam, adam_rows, muon"):
        replace(config, optim=with_group("lm_head", config.optim, rule="sgd"))


def run_with(name: str, preset_name: str = "r18-softcap", **changes: Any) -> RunConfig:
    config = preset(preset_name)
    return replace(config, optim=with_group(name, config.optim, **changes))


TWO_RANKS = Ranks(rank=0, world=2)
BY_ROWS = "takes rows gradients, but "
WRONG: list[tuple[RunConfig, Ranks, str]] = [
    (run_with("scalars", rule="adam_rows"), SINGLE_PROCESS, f"{BY_ROWS}skip_weights of group 'scalars' has dense ones"),
    (run_with("matrices", rule="adam_rows"), SINGLE_PROCESS, f"{BY_ROWS}blocks.0.attention.query of group 'matrices'"),
    (run_with("lm_head", rule="adam_rows"), SINGLE_PROCESS, f"{BY_ROWS}head of group 'lm_head' has dense ones"),
    (
        run_with("embeddings", "r05-modern-arch", rule="adam_rows"),
        SINGLE_PROCESS,
        f"{BY_ROWS}embeddings.token of group 'embeddings' has dense ones",  # it is the head, too
    ),
    (
        run_with("value_embeddings", "r15-unet-values", rule="adam_rows"),
        SINGLE_PROCESS,
        f"{BY_ROWS}embeddings.value_chunks of group 'value_embeddings'",  # layers look up slices of it
    ),
    (
        run_with("value_embeddings", rule="adam_rows", every=2),
        SINGLE_PROCESS,
        "'value_embeddings' with every 2 cannot be moved by rule 'adam_rows'; use 1",
    ),
    (
        replace(run_with("lm_head", every=2), parallel=ParallelConfig(fsdp=True)),
        TWO_RANKS,
        "'lm_head' with every 2 cannot be moved under --parallel.fsdp; use 1",
    ),
    (
        run_with("scalars", rule="muon"),
        SINGLE_PROCESS,
        "rule 'muon' moves matrices, but skip_weights of group 'scalars' has shape (6,)",
    ),
]


@pytest.mark.parametrize(("config", "ranks", "message"), WRONG, ids=[message for *_, message in WRONG])
def test_a_rule_that_cannot_move_a_parameter_is_refused(config: RunConfig, ranks: Ranks, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        checked_groups(config, ranks)
    assert message in one_line(refused.value)


@pytest.mark.parametrize(
    ("rule", "message"), [("adam_rows", "takes rows gradients, but skip_weights"), ("muon", "moves matrices, but skip")]
)
def test_such_a_rule_is_refused_before_anything_asks_for_its_memory(rule: str, message: str) -> None:
    config = run_with("scalars", rule=rule)
    config = replace(config, train=replace(config.train, device="cpu"))
    with pytest.raises(ConfigError, match=message):
        inspect_machine(config)


def test_muon_may_move_any_group_of_matrices() -> None:
    assert checked_groups(run_with("lm_head", rule="muon"), SINGLE_PROCESS)["lm_head"].rule == "muon"


def test_a_group_to_average_that_the_model_has_not_is_refused_unless_it_is_a_usual_one() -> None:
    """A model with a tied head has no group of the head, which the default averages all the same."""
    config = preset("r05-modern-arch")
    assert "lm_head" not in describe(config.model).groups
    known = "there are embeddings, matrices"
    with pytest.raises(ConfigError, match=rf"--optim\.average\.groups: 'heads' is no group of this model; {known}"):
        replace(config, optim=replace(config.optim, average=AverageConfig(groups=("matrices", "heads"))))


@pytest.mark.parametrize("name", list(PRESETS))
def test_every_preset_has_a_rule_that_fits_each_of_its_groups(name: str) -> None:
    config = preset(name)
    groups = checked_groups(config, SINGLE_PROCESS)
    assert set(groups) == {parameter.group for parameter in describe(config.model).parameters}
    assert all(group.every == 1 for group in groups.values())


def test_tables_that_are_only_looked_up_may_be_moved_by_rows() -> None:
    for name in ("embeddings", "value_embeddings"):
        assert checked_groups(run_with(name, rule="adam_rows"), SINGLE_PROCESS)[name].rule == "adam_rows"
