"""Long lines with few points: a smoothed twin of a noisy curve, and which of its points to keep."""

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from paceline.report.curves import Column

SMOOTHING_SHARE = 0.02
"""Half-life of the smoothed training loss, as a share of the recorded steps."""


def smoothed(values: Column) -> Column:
    """A mean over both sides, weights falling by half every `SMOOTHING_SHARE` of the run: the usual one-sided mean
    would lag behind a falling loss and show it too high. A value that is missing leaves a gap."""
    keep = 0.5 ** (1.0 / max(1.0, SMOOTHING_SHARE * len(values)))
    missing = np.isnan(values)
    sums = _two_sided(np.where(missing, 0.0, values).tolist(), keep)
    weights = _two_sided((~missing).astype(float).tolist(), keep)
    smooth: Column = np.divide(sums, weights, out=np.full(len(values), np.nan), where=~missing)
    return smooth


def _two_sided(values: Sequence[float], keep: float) -> Column:
    """For each place the sum of all values, each times keep to the power of its distance."""
    before = list(itertools.accumulate(values, lambda total, value: keep * total + value))
    after = list(itertools.accumulate(reversed(values), lambda total, value: keep * total + value))[::-1]
    total: Column = np.array(before) + np.array(after) - np.array(values)
    return total


def kept(values: Column, points: int) -> NDArray[np.intp]:
    """Indices of at most `points` values (at least 4): the first, the last, and of every stretch between the lowest
    and the highest, so that a spike of one step is seen at any width."""
    count = len(values)
    if count <= points:
        return np.arange(count)
    edges = np.linspace(0, count, points // 2).astype(int)  # one stretch fewer than half: room for both ends
    lowest, highest = np.where(np.isnan(values), np.inf, values), np.where(np.isnan(values), -np.inf, values)
    chosen = {0, count - 1}
    for start, end in itertools.pairwise(edges.tolist()):
        chosen |= {start + int(lowest[start:end].argmin()), start + int(highest[start:end].argmax())}
    return np.array(sorted(chosen))
