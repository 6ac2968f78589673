"""Curves with few points: nothing that a reader would look for is lost."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.report.curves import kept, smoothed

LOSSES = st.lists(st.one_of(st.floats(-1e6, 1e6), st.just(float("nan"))), min_size=1, max_size=300)


@given(values=LOSSES, points=st.integers(4, 100))
def test_ends_and_extremes_survive_any_thinning(values: list[float], points: int) -> None:
    curve = np.array(values)
    chosen = kept(curve, points)
    assert len(chosen) <= max(points, 4)
    assert list(chosen) == sorted(set(chosen))
    assert chosen[0] == 0
    assert chosen[-1] == len(curve) - 1
    if not np.isnan(curve).all():
        assert np.nanmin(curve[chosen]) == np.nanmin(curve)
        assert np.nanmax(curve[chosen]) == np.nanmax(curve)


def test_a_spike_of_one_step_is_still_seen() -> None:
    curve = np.linspace(10, 3, 20_000)
    curve[12_345] = 50.0
    assert 12_345 in kept(curve, 100)


def test_smoothing_does_not_lag_behind_a_line_and_keeps_gaps() -> None:
    line = np.arange(200, 0, -1.0)
    assert smoothed(line)[80:120] == pytest.approx(line[80:120], abs=0.01)
    gap = smoothed(np.array([1.0, np.nan, 1.0]))
    assert gap[[0, 2]] == pytest.approx([1.0, 1.0])
    assert np.isnan(gap[1])
    assert len(smoothed(np.array([]))) == 0
