"""Rates and momentum at every step of every record, from the closed forms."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis.strategies import floats, integers

from paceline.core.errors import ConfigError
from paceline.settings.optim import AdamConfig, MuonConfig, OptimConfig, ScheduleConfig
from paceline.settings.schedule import cooldown_steps_of, lr_scale, muon_momentum, rate_at, scaled_to


def scale_at(step: int, schedule: ScheduleConfig, steps: int) -> float:
    return lr_scale(step, steps=steps, cooldown_steps=cooldown_steps_of(schedule, steps), floor=schedule.floor)


def in_steps(cooldown: int) -> ScheduleConfig:
    return ScheduleConfig(cooldown_steps=cooldown, cooldown_share=None)


@pytest.mark.parametrize(
    ("record", "steps", "flat_until", "cooldown"),
    [
        (4, 6200, 4400, 1800),
        (5, 5100, 3650, 1450),
        (13, 1750, 1110, 640),
        (14, 1530, 930, 600),
        (15, 1480, 880, 600),
        (16, 1480, 880, 600),
        (17, 1490, 890, 600),
    ],
)
def test_a_cooldown_in_steps_follows_the_record_exactly(
    record: int, steps: int, flat_until: int, cooldown: int
) -> None:
    expected = [1.0 if step < flat_until else (steps - step) / cooldown for step in range(steps)]
    assert [scale_at(step, in_steps(cooldown), steps) for step in range(steps)] == expected
    assert expected[-1] == 1 / cooldown, "the last update still moves"


@pytest.mark.parametrize("steps", [1390, 266, 95])  # record 18, and two lengths at which the share is not whole
def test_a_cooldown_share_is_a_function_of_step_over_steps(steps: int) -> None:
    for step in range(steps):
        remaining = 1 - step / steps
        expected = 1.0 if remaining >= 0.4 else remaining / 0.4
        assert scale_at(step, ScheduleConfig(cooldown_share=0.4), steps) == pytest.approx(expected, rel=1e-12)


def test_record_18_cools_over_its_last_556_steps() -> None:
    schedule = ScheduleConfig(cooldown_share=0.4)
    assert cooldown_steps_of(schedule, 1390) == pytest.approx(556)
    assert scale_at(834, schedule, 1390) == 1.0
    assert scale_at(835, schedule, 1390) < 1.0
    assert scale_at(1389, schedule, 1390) == pytest.approx(0.0017986, abs=5e-8)


def test_the_line_aims_at_the_floor_one_step_after_the_last() -> None:
    schedule = ScheduleConfig(cooldown_steps=50, cooldown_share=None, floor=0.2)
    assert scale_at(100, schedule, 100) == 0.2
    assert scale_at(75, schedule, 100) == pytest.approx(0.6)
    assert scale_at(50, schedule, 100) == 1.0


@given(step=integers(0, 1000), steps=integers(1, 1000), share=floats(0.01, 1), floor=floats(0, 1))
def test_the_multiplier_stays_between_floor_and_one(step: int, steps: int, share: float, floor: float) -> None:
    schedule = ScheduleConfig(cooldown_share=share, floor=floor)
    now, then = (scale_at(min(s, steps), schedule, steps) for s in (step, step + 1))
    assert floor <= then <= now <= 1.0


@pytest.mark.parametrize("floor", [-0.1, 1.1])
def test_a_floor_outside_the_rates_is_refused(floor: float) -> None:
    with pytest.raises(ConfigError, match=r"--optim.schedule.floor"):
        ScheduleConfig(floor=floor)


def test_a_cooldown_longer_than_the_run_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--optim.schedule.cooldown-steps 601 .*600 steps"):
        cooldown_steps_of(in_steps(601), 600)


def test_momentum_warms_up_over_300_steps() -> None:
    muon = MuonConfig(momentum_start=0.85, momentum_warmup_steps=300)
    for step in range(1390):
        assert muon_momentum(step, 1390, muon) == pytest.approx(0.85 + 0.10 * min(step / 300, 1), abs=1e-15)
    assert muon_momentum(300, 1390, muon) == 0.95


def test_momentum_rises_and_falls_over_shares_of_the_run() -> None:
    """A fifth up, a twenty-fifth back: of 1,000 steps 200 and 40."""
    muon = MuonConfig(momentum_start=0.85, momentum_warmup_share=0.2, momentum_cooldown_share=0.04)
    for step in range(1001):
        expected = 0.85 + 0.10 * min(step / 200, (1000 - step) / 40, 1)
        assert muon_momentum(step, 1000, muon) == pytest.approx(expected, abs=1e-15)
    assert muon_momentum(200, 1000, muon) == muon_momentum(960, 1000, muon) == 0.95
    with pytest.raises(ConfigError, match=r"momentum-warmup-steps 300 and --optim.muon.momentum-warmup-share: set one"):
        replace(muon, momentum_warmup_steps=300)


def test_where_the_rise_and_the_fall_of_momentum_overlap_the_lower_one_holds() -> None:
    """Ten steps: up over the first eight, back over the last six."""
    muon = MuonConfig(momentum_start=0.85, momentum_warmup_share=0.8, momentum_cooldown_share=0.6)
    for step in range(11):
        expected = 0.85 + 0.10 * min(step / 8, (10 - step) / 6)
        assert muon_momentum(step, 10, muon) == pytest.approx(expected, abs=1e-15), step


def test_momentum_without_warm_up_is_constant_from_step_0() -> None:
    assert {muon_momentum(step, 10, MuonConfig(momentum_start=0.5)) for step in range(10)} == {0.95}


def test_steps_scale_a_cooldown_given_in_steps() -> None:
    r17 = OptimConfig(schedule=in_steps(600), muon=MuonConfig(momentum_start=0.85, momentum_warmup_steps=300))
    assert scaled_to(r17, 1490, 95) == replace(r17, schedule=in_steps(38)), "nothing but the cool-down changes"
    assert scaled_to(r17, 1490, 2980).schedule.cooldown_steps == 1200
    assert scaled_to(r17, 1490, 1).schedule.cooldown_steps == 1, "the shortest run still has a cool-down"


def test_steps_leave_a_cooldown_share_alone() -> None:
    r18 = OptimConfig(schedule=ScheduleConfig(cooldown_share=0.4), adam=AdamConfig(lm_head_lr=0.1))
    assert scaled_to(r18, 1390, 266) == r18


@given(cooldown=integers(1, 5000), extra=integers(0, 5000), after=integers(1, 10_000))
def test_a_scaled_cooldown_always_fits_its_run(cooldown: int, extra: int, after: int) -> None:
    scaled = scaled_to(OptimConfig(schedule=in_steps(cooldown)), cooldown + extra, after)
    assert 1 <= cooldown_steps_of(scaled.schedule, after) <= after


# ---- warm-up and cosine


def llm_c_multiplier(step: int, steps: int, warmup: int, least: float) -> float:
    """As llm.c states it."""
    if step < warmup:
        return (step + 1) / warmup
    return least + 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))) * (1 - least)


@pytest.mark.parametrize(("warmup", "steps", "floor"), [(700, 18_865, 0.0), (0, 100, 0.1), (1, 10, 0.5)])
def test_warm_up_and_cosine_are_those_of_llm_c(warmup: int, steps: int, floor: float) -> None:
    rates = ScheduleConfig(warmup_steps=warmup, shape="cosine", cooldown_share=1.0, floor=floor)
    for step in {*range(min(steps, 10)), warmup - 1, warmup, warmup + 1, steps // 2, steps - 1, steps} - {-1}:
        assert rate_at(rates, step, steps) == pytest.approx(llm_c_multiplier(step, steps, warmup, floor), abs=1e-12)


def test_a_cool_down_after_a_warm_up_takes_its_share_of_the_rest() -> None:
    rates = ScheduleConfig(warmup_steps=20, cooldown_share=0.5)
    assert [rate_at(rates, step, 120) for step in (0, 19, 20, 70, 95, 119)] == pytest.approx(
        [1 / 20, 1.0, 1.0, 1.0, 0.5, 1 / 50]
    )


def test_a_warm_up_keeps_its_proportion_and_always_leaves_a_step() -> None:
    optim = OptimConfig(schedule=ScheduleConfig(warmup_steps=700, shape="cosine", cooldown_share=1.0))
    assert scaled_to(optim, 18_865, 266).schedule.warmup_steps == 10
    assert scaled_to(optim, 701, 1).schedule.warmup_steps == 0


def test_a_warm_up_as_long_as_the_run_is_refused_by_its_flag() -> None:
    with pytest.raises(ConfigError, match=r"--optim.schedule.warmup-steps 10 leaves nothing of the run of 10 steps"):
        cooldown_steps_of(ScheduleConfig(warmup_steps=10), 10)
    both = ScheduleConfig(warmup_steps=10, cooldown_steps=95, cooldown_share=None)
    with pytest.raises(ConfigError, match="cooldown-steps 95 is longer than the run of 100 steps after 10 of"):
        cooldown_steps_of(both, 100)
