"""The settings of a step: where stages begin, what each changes, and the borders at which windows grow."""

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import islice, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import ConfigError
from paceline.recipes.presets import preset
from paceline.recipes.scaling import with_steps
from paceline.settings.model import WindowConfig
from paceline.settings.optim import OptimConfig, ScheduleConfig
from paceline.settings.run import RunConfig
from paceline.settings.schedule import (
    SAMPLED_STEPS,
    Stage,
    largest_batch,
    sampled_steps,
    scaled_to,
    schedule,
    sequences_from,
    stage_of,
    stage_starts,
    tokens_before,
    widest_windows,
    windows_at,
)

DEMO = preset("demo")
SEQUENCE = DEMO.batch.sequence_tokens


def staged(steps: int, *stages: Stage) -> RunConfig:
    return replace(with_steps(DEMO, steps), stages=stages)


def shares(*parts: float) -> Sequence[Stage]:
    return [Stage(share=part) for part in parts]


@pytest.mark.parametrize(
    ("steps", "parts", "starts"),
    [
        (10, (0.5, 0.5), [0, 5, 10]),
        (7, (0.5, 0.5), [0, 4, 7]),  # 3.5 goes to the even neighbour, as Python rounds
        (9, (0.5, 0.5), [0, 4, 9]),  # and so does 4.5
        (10, (0.19, 0.81), [0, 2, 10]),  # 1.9
        (10, (0.11, 0.89), [0, 1, 10]),  # 1.1
        (100, (1 / 3, 1 / 3, 1 / 3), [0, 33, 67, 100]),  # 33.3 and 66.7: borders are rounded, not lengths
        (10, (0.16, 0.16, 0.68), [0, 2, 3, 10]),  # 1.6 and 3.2
    ],
)
def test_a_border_is_the_sum_of_the_shares_before_it_rounded(
    steps: int, parts: tuple[float, ...], starts: list[int]
) -> None:
    run = staged(steps, *shares(*parts))
    assert stage_starts(run) == starts
    stages = [stage_of(run, step) for step in range(steps)]
    assert stages == [n for n, (start, end) in enumerate(pairwise(starts)) for _ in range(start, end)]
    assert stage_of(run, steps) == len(parts) - 1


@pytest.mark.parametrize(
    ("cooldown", "before", "after", "expected"),
    [(640, 1750, 95, 35), (600, 1490, 95, 38), (3, 8, 4, 2), (5, 8, 4, 2), (1, 100, 100, 1), (7, 100, 200, 14)],
)  # 34.7, 38.3, 1.5, 2.5
def test_a_cooldown_of_another_length_is_rounded_to_the_nearest_step(
    cooldown: int, before: int, after: int, expected: int
) -> None:
    optim = OptimConfig(schedule=ScheduleConfig(cooldown_steps=cooldown, cooldown_share=None))
    assert scaled_to(optim, before, after).schedule.cooldown_steps == expected


@given(
    start=st.integers(1, 20), growth=st.integers(-20, 20), quantum=st.sampled_from([1, 100, 128]),
    steps=st.integers(1, 300), data=st.data(),
)  # fmt: skip
def test_a_window_is_whole_quanta_rounded_down(
    start: int, growth: int, quantum: int, steps: int, data: st.DataObject
) -> None:
    """Against exact fractions; only within a rounding error of a border may floats decide otherwise."""
    if start + growth < 1:
        return
    window = WindowConfig(
        unit="tokens", start_tokens=start * quantum, growth_tokens=growth * quantum, quantum_tokens=quantum
    )
    step = data.draw(st.integers(0, steps))
    exact = start + Fraction(growth * step, steps)
    near = {int(exact // 1), int((exact + Fraction(1, 10**9)) // 1)}
    assert Fraction(window.tokens_at(step, steps), quantum) in near
    assert window.widest_tokens == quantum * max(start, start + growth)


def test_a_window_grows_at_the_step_that_completes_a_quantum() -> None:
    window = WindowConfig(unit="blocks", start_tokens=128, growth_tokens=512, quantum_tokens=128)
    assert [window.tokens_at(step, 8) for step in range(9)] == [128, 128, 256, 256, 384, 384, 512, 512, 640]


def test_each_stage_has_its_batch_rate_windows_and_weights() -> None:
    plain = staged(10)
    run = staged(
        10,
        Stage(share=0.3, batch_tokens=2 * SEQUENCE, lr=0.5),
        Stage(share=0.5, window_tokens=256),
        Stage(share=0.2, batch_tokens=4 * SEQUENCE, lr=0.0),
    )
    usual = DEMO.batch.sequences
    sizes = [2] * 3 + [usual] * 5 + [4] * 2
    assert [schedule(run, step).sequences for step in range(10)] == sizes
    assert list(islice(sequences_from(run, 0), 12)) == [*sizes, 4, 4]
    assert list(islice(sequences_from(run, 7), 3)) == [usual, 4, 4]
    assert [tokens_before(run, step) for step in range(11)] == [SEQUENCE * sum(sizes[:step]) for step in range(11)]
    assert largest_batch(run).tokens == max(4 * SEQUENCE, DEMO.batch.tokens)
    for step in range(10):
        found, before = schedule(run, step), schedule(plain, step)
        factor = (0.5, 1.0, 0.0)[stage_of(run, step)]
        assert (found.step, found.stage) == (step, stage_of(run, step))
        assert found.lr_scale == factor * before.lr_scale
        assert all(group.lr == factor * before.groups[name].lr for name, group in found.groups.items())
        assert found.windows == ({"short": 256} if found.stage == 1 else before.windows)


def test_the_widest_window_is_found_at_the_ends_of_stages() -> None:
    for stages in ((), shares(0.5, 0.5), (Stage(share=0.5, window_tokens=1024), Stage(share=0.5))):
        run = staged(10, *stages)
        assert widest_windows(run)["short"] == max(windows_at(run, step)["short"] for step in range(11))
    shrinking = replace(DEMO.model.window, start_tokens=1024, growth_tokens=-512)
    run = replace(staged(10, *shares(0.5, 0.5)), model=replace(DEMO.model, window=shrinking))
    assert widest_windows(run) == {"short": 1024}


@pytest.mark.parametrize("steps", [1, 9_999, SAMPLED_STEPS, 2 * SAMPLED_STEPS - 1, 2 * SAMPLED_STEPS, 10**7])
def test_a_long_run_is_sampled_evenly_from_its_first_step(steps: int) -> None:
    found = sampled_steps(steps)
    assert found[0] == 0
    assert found.stop == steps
    assert min(steps, SAMPLED_STEPS) <= len(found) < 2 * SAMPLED_STEPS
    assert found.step == 1 or steps >= 2 * SAMPLED_STEPS


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        (shares(0.5, 0.4), "add up to 0.9, not 1"),
        (shares(0.5, 0.50001), "add up to 1.00001, not 1"),
        (shares(0.96, 0.04), "stage 2 has no step in a run of 10"),
        (shares(0.04, 0.96), "stage 1 has no step in a run of 10"),
        ((Stage(share=1.0, long_window_tokens=256),), "stage 1 sets long_window_tokens"),
        ((Stage(share=0.5), Stage(share=0.5, loss_weights=(1.0,))), "stage 2 has 1 loss_weights for 0 loss_terms"),
        ((Stage(share=1.0, candidates=200),), "stage 1 has 200 candidates; set --model.candidates, too"),
        ((Stage(share=1.0, window_tokens=200),), "window of 200, not a multiple of 128"),
        ((Stage(share=1.0, batch_tokens=SEQUENCE + 1),), "--batch.tokens"),
    ],
)
def test_stages_that_cannot_be_carried_out_are_refused(stages: tuple[Stage, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        staged(10, *stages)


@pytest.mark.parametrize("last", [0.5, 0.5 + 9e-7, 0.5 - 9e-7])  # thirds do not add up to 1 to the last digit
def test_shares_that_miss_one_by_a_rounding_error_are_taken(last: float) -> None:
    staged(10, *shares(0.5, last))


@pytest.mark.parametrize("values", [{"share": 0.0}, {"share": 1.1}, {"lr": -0.1}, {"window_tokens": 0}])
def test_a_stage_has_limits(values: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="stages: "):
        Stage(**{"share": 1.0, **values})  # type: ignore[arg-type]
