"""On runs with a known truth, intervals cover at 95 ± 2 %, tests hold their error rates, and as many runs as were said
to be needed have the power that was promised. Seeds are fixed; 3,000 repetitions put ± 0.8 % around 95 %."""

import math
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import pytest
import scipy.stats

from lab.simulated import Trial, cooled, power_law
from paceline.analysis.statistics import (
    MOST_RUNS,
    Estimate,
    Test,
    exchange_rate,
    holm,
    mean_at_most,
    paired,
    runs_needed,
    smallest_effect,
    time_at_equal_loss,
    welch,
)
from paceline.core.errors import UserError

REPEATS = 3_000
SPREAD = 0.002
"""Of final losses, as in the public logs of records 15 to 18."""


def covers(estimates: Iterable[Estimate | None], truth: float) -> float:
    """Share of the intervals that hold the truth; a missing estimate does not."""
    return float(np.mean([e is not None and e.low <= truth <= e.high for e in estimates]))


def rejects(ps: Iterable[float], level: float) -> float:
    return float(np.mean([p < level for p in ps]))


@pytest.mark.parametrize(("n", "m"), [(2, 2), (2, 10), (3, 3), (3, 8), (7, 4)])
@pytest.mark.parametrize("spread", [0.2, 1.0, 5.0])
def test_intervals_and_p_values_are_those_of_scipys_own_tests(n: int, m: int, spread: float) -> None:
    """Above all Welch's degrees of freedom, no whole number, which depend on sizes and spreads of both groups."""
    rng = np.random.default_rng(100 * n + m)
    a, b = 3.28 + SPREAD * spread * rng.normal(size=n), 3.281 + SPREAD * rng.normal(size=m)
    same = min(n, m)
    scipys = [
        (welch(a, b), scipy.stats.ttest_ind(a, b, equal_var=False)),
        (paired(a[:same], b[:same]), scipy.stats.ttest_rel(a[:same], b[:same])),
    ]
    for found, expected in scipys:
        interval = expected.confidence_interval(0.95)
        assert (found.low, found.high) == pytest.approx((interval.low, interval.high), rel=1e-9)
        assert found.p == pytest.approx(expected.pvalue, rel=1e-9)
        assert (found.low + found.high) / 2 == pytest.approx(found.mean)
    assert [found.n for found, _ in scipys] == [n + m, same]
    assert mean_at_most(a, 3.281) == pytest.approx(scipy.stats.ttest_1samp(a, 3.281, alternative="less").pvalue)


@pytest.mark.parametrize("n", [2, 3, 10])
def test_the_paired_interval_covers(n: int) -> None:
    rng = np.random.default_rng(n)
    without = rng.normal(3.28, SPREAD, (REPEATS, n))
    with_ = without - 0.004 + rng.normal(0, SPREAD, (REPEATS, n))
    assert covers(map(paired, with_, without), -0.004) == pytest.approx(0.95, abs=0.02)


@pytest.mark.parametrize(("sizes", "spreads"), [((3, 3), (1, 1)), ((5, 10), (2, 1)), ((10, 10), (1, 4))])
def test_welchs_interval_covers_with_unequal_groups(sizes: tuple[int, int], spreads: tuple[int, int]) -> None:
    rng = np.random.default_rng(sum(sizes))
    a, b = (rng.normal(0, SPREAD * spread, (REPEATS, n)) for n, spread in zip(sizes, spreads, strict=True))
    assert covers(map(welch, a + 0.003, b), 0.003) == pytest.approx(0.95, abs=0.02)


def test_the_two_sided_tests_raise_as_many_false_alarms_as_they_say() -> None:
    rng = np.random.default_rng(1)
    a, b = rng.normal(3.28, SPREAD, (2, REPEATS, 4))
    for test in (paired, welch):
        assert rejects((test(x, y).p for x, y in zip(a, b, strict=True)), 0.05) == pytest.approx(0.05, abs=0.01)


@pytest.mark.parametrize("n", [3, 10])
def test_the_records_rule_passes_one_unfit_group_in_a_hundred(n: int) -> None:
    losses = np.random.default_rng(n).normal(3.28, SPREAD, (4 * REPEATS, n))  # the mean is the target: the worst case
    assert rejects((mean_at_most(group, 3.28) for group in losses), 0.01) == pytest.approx(0.01, abs=0.003)


def test_holm_holds_the_rate_of_any_false_alarm_in_a_family_of_correlated_comparisons() -> None:
    rng = np.random.default_rng(2)
    base, arms = rng.normal(3.28, SPREAD, (REPEATS, 4)), rng.normal(3.28, SPREAD, (REPEATS, 6, 4))
    families = [[paired(arm, without).p for arm in group] for group, without in zip(arms[:1000], base, strict=False)]
    assert rejects((min(family) for family in families), 0.05) > 0.12  # what the correction is for
    assert rejects((min(holm(family)) for family in families), 0.05) <= 0.05 + 0.015


def test_holm_keeps_the_order_and_never_lets_a_larger_p_overtake() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def simulated_ps(test: Test, n: int, effect: float) -> list[float]:
    """Of as many tests, where the truth is `effect`."""
    rng = np.random.default_rng(3)
    shifted, centred = rng.normal(effect, SPREAD, (REPEATS, n)), rng.normal(0, SPREAD, (REPEATS, n))
    if test == "one-sided":
        return [mean_at_most(-losses, 0.0) for losses in shifted]
    if test == "paired":
        return [paired(differences, np.zeros(n)).p for differences in shifted]
    return [welch(a, b).p for a, b in zip(shifted, centred, strict=True)]


@pytest.mark.parametrize(("test", "alpha"), [("one-sided", 0.01), ("paired", 0.05), ("welch", 0.05)])
@pytest.mark.parametrize("effect", [1.0, 2.5])
def test_the_runs_needed_have_the_power_promised_and_one_fewer_has_not(test: Test, alpha: float, effect: float) -> None:
    n = runs_needed(SPREAD, effect * SPREAD, alpha=alpha, test=test)
    assert smallest_effect(SPREAD, n, alpha=alpha, test=test) <= effect * SPREAD
    assert smallest_effect(SPREAD, n - 1, alpha=alpha, test=test) > effect * SPREAD
    at_the_floor = smallest_effect(SPREAD, n, alpha=alpha, test=test)
    assert rejects(simulated_ps(test, n, at_the_floor), alpha) == pytest.approx(0.8, abs=0.025)


def test_no_difference_is_never_found_and_a_huge_one_with_two_runs() -> None:
    assert runs_needed(SPREAD, 0.0, alpha=0.05) == MOST_RUNS
    assert runs_needed(SPREAD, 1e-9, alpha=0.05, test="welch") == MOST_RUNS
    assert runs_needed(SPREAD, -1e6, alpha=0.01, test="paired") == 2
    assert runs_needed(0.0, 0.1, alpha=0.01) == 2


FULL = Trial()
SPARSE = Trial(steps=266, evaluate_every=95, step_s=1.0)
SMALL = Trial(steps=40, evaluate_every=5, step_s=0.5, luck=0.02, noise=0.01, gain=0.05)
TRIALS = {
    "a small gain": FULL,
    "a large gain, ten pairs": replace(FULL, gain=0.04, pairs=10, curve=power_law),
    "no gain": replace(FULL, gain=0.0),
    "a loss, and faster": replace(FULL, gain=-0.01, slower=0.95, pairs=5),
    "a gain that slower steps eat": replace(FULL, gain=0.01, slower=1.03),
    "four evaluations": SPARSE,
    "forty steps with much noise": SMALL,
    "noise that hides the fall": replace(FULL, curve=power_law, noise=0.02, luck=0.005, gain=0.02),
}


def seconds_at_equal_loss(trial: Trial, repeats: int) -> list[Estimate | None]:
    rng = np.random.default_rng(4)
    times = [trial.clock(trial.at, slower).tolist() for slower in (trial.slower, 1.0)]
    both = zip(*trial.losses(repeats, rng), strict=True)
    return [time_at_equal_loss([(times[0], y) for y in a], [(times[1], y) for y in b]) for a, b in both]


@pytest.mark.parametrize("name", TRIALS)
def test_the_interval_of_time_at_equal_loss_covers(name: str) -> None:
    trial = TRIALS[name]
    estimates = seconds_at_equal_loss(trial, repeats=2_400 // trial.pairs)
    assert covers(estimates, trial.truth) == pytest.approx(0.95, abs=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("name", TRIALS)
def test_and_so_it_does_in_a_longer_series(name: str) -> None:
    assert covers(seconds_at_equal_loss(TRIALS[name], 10_000), TRIALS[name].truth) == pytest.approx(0.95, abs=0.02)


@pytest.mark.parametrize("curve", [power_law, cooled])
@pytest.mark.parametrize(("every", "share"), [(125, 0.01), (500, 0.07)])
def test_without_noise_only_the_gaps_between_evaluations_blur_the_time(
    curve: Callable[..., np.ndarray], every: int, share: float
) -> None:
    for gain in (0.003, 0.01, 0.05):
        trial = Trial(curve=curve, evaluate_every=every, gain=gain, luck=0.0, noise=0.0, pairs=2)
        (found,) = seconds_at_equal_loss(trial, 1)
        assert found is not None
        assert found.mean == pytest.approx(trial.truth, rel=share)


@pytest.mark.parametrize("unit", [1.0, 1e-3, 1e3])
def test_the_time_at_equal_loss_has_the_unit_of_the_clock(unit: float) -> None:
    """Also where evaluations lie within the first second; only the one at the clock's zero is left out."""

    def curve(seconds: float, drop: float) -> tuple[list[float], list[float]]:
        times = [unit * seconds * n for n in (0, 1, 2, 3, 4)]
        return times, [9.0, 4.0 - drop, 3.6 - drop, 3.4 - drop, 3.3 - drop]

    slower = time_at_equal_loss([curve(11.0, 0.0), curve(12.0, 0.0)], [curve(10.0, 0.0), curve(10.0, 0.0)])
    assert slower is not None
    assert slower.mean == pytest.approx(unit * 6.0)  # 4 x 1 and 4 x 2 seconds: both end at 3.3
    sooner = time_at_equal_loss([curve(10.0, 0.2), curve(10.0, 0.2)], [curve(10.0, 0.0), curve(10.0, 0.0)])
    assert sooner is not None
    assert sooner.mean == pytest.approx(unit * -(40.0 - 24.6), rel=0.1)  # 3.3 lies between 3.4 and 3.2, after 20 to 30


FALL = ([10.0, 20.0, 30.0], [4.0, 3.5, 3.3])


@pytest.mark.parametrize(
    "other",
    [
        ([10.0, 20.0, 30.0], [3.2, 3.1, 3.0]),  # was below 3.3 before it was first looked at
        ([10.0, 20.0, 30.0], [5.0, 4.8, 4.5]),  # ends above where the first one begins
        ([10.0, 20.0, 30.0], [4.0, math.nan, math.nan]),  # diverged
        ([0.0, 30.0], [10.8, 3.3]),  # was looked at once after the clock began
        ([], []),
    ],
)
def test_a_loss_that_a_curve_does_not_show_gives_no_time(other: tuple[list[float], list[float]]) -> None:
    assert time_at_equal_loss([FALL, FALL], [FALL, other]) is None
    assert time_at_equal_loss([FALL, other], [FALL, FALL]) is None


def test_the_exchange_rate_is_the_slope_at_the_end() -> None:
    """A power law a + b·s^-c buys one unit of loss with s^(c+1) / (b·c) steps."""
    steps = np.arange(125, 1501, 125)
    assert exchange_rate(steps, 2 + 9 * steps**-0.3, 1500) == pytest.approx(1500**1.3 / 2.7, rel=0.01)
    assert exchange_rate([1000, 1500], [3.5, 3.4], 1500) == pytest.approx(1500 * math.log(1.5) / 0.1)


@pytest.mark.parametrize("losses", [[3.0, 3.1, 3.2], [3.0, 3.0, 3.0], [math.nan, math.nan, 3.0]])
def test_where_the_loss_does_not_fall_steps_buy_none(losses: list[float]) -> None:
    assert exchange_rate([20, 30, 40], losses, 40) is None


def test_runs_without_any_spread_decide_a_question() -> None:
    assert paired([1.0, 2.0], [1.0, 2.0]) == Estimate(mean=0.0, low=0.0, high=0.0, p=1.0, n=2)
    assert paired([1.0, 2.0], [2.0, 3.0]) == Estimate(mean=-1.0, low=-1.0, high=-1.0, p=0.0, n=2)
    assert welch([1.0, 1.0], [3.0, 3.0, 3.0]) == Estimate(mean=-2.0, low=-2.0, high=-2.0, p=0.0, n=5)
    assert [mean_at_most([3.0, 3.0], target) for target in (2.9, 3.0, 3.1)] == [1.0, 0.5, 0.0]


def test_one_run_or_unequal_pairs_are_refused_in_a_line() -> None:
    for call in (lambda: paired([1.0], [2.0]), lambda: welch([1.0], [2.0, 3.0]), lambda: mean_at_most([1.0], 2.0)):
        with pytest.raises(UserError, match="1 run shows no spread"):
            call()
    with pytest.raises(UserError, match="2 runs cannot be paired with 1"):
        paired([1.0, 2.0], [1.0])
    with pytest.raises(UserError, match="1 runs cannot be paired with 2"):
        time_at_equal_loss([FALL], [FALL, FALL])


def test_the_interval_leaves_0_out_where_p_is_below_five_percent() -> None:
    rng = np.random.default_rng(5)
    a, b = rng.normal(3.28, SPREAD, (2, 200, 3))
    for test in (paired, welch):
        for estimate in map(test, a + SPREAD, b):
            assert (estimate.low > 0 or estimate.high < 0) == (estimate.p < 0.05)


def test_scipy_is_loaded_when_something_is_computed_and_missed_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import sys, paceline.cli, paceline.commands.results, paceline.analysis.statistics\n"
        "sys.exit('scipy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    monkeypatch.setitem(sys.modules, "scipy.special", None)
    with pytest.raises(UserError, match=r"pip install 'paceline\[report\]'"):
        paired([1.0, 2.0], [2.0, 4.0])
