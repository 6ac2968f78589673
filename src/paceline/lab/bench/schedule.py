"""A step's time depends on its tokens and its attention window, so it is measured at each batch size and at a few
windows of the schedule and averaged with the schedule's weights. No torch."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from paceline.settings.schedule import StepSettings


class Point(NamedTuple):
    """A batch size and a window to measure at."""

    sequences: int
    window: int | None  # the widest of a step, in tokens; None where the preset has none
    step: int  # a step of the schedule that has them
    steps: int  # of the schedule for which it stands: of this batch size, with this window or the nearest to it


def points_of(steps: Sequence[StepSettings], limit: int) -> list[Point]:
    """Of each batch size at most `limit` of the windows of its steps, evenly spaced with both ends among them."""
    sizes = dict.fromkeys(at.sequences for at in steps)
    return [point for size in sizes for point in _points([at for at in steps if at.sequences == size], limit)]


def _points(steps: Sequence[StepSettings], limit: int) -> list[Point]:
    windows = [max(at.windows.values(), default=0) for at in steps]
    chosen = _spread(sorted(set(windows)), limit)
    standing = Counter(min(chosen, key=lambda at: abs(at - window)) for window in windows)
    points = []
    for window in chosen:
        having = [at.step for at, found in zip(steps, windows, strict=True) if found == window]
        points.append(Point(steps[0].sequences, window or None, having[len(having) // 2], standing[window]))
    return points


def _spread(windows: Sequence[int], limit: int) -> list[int]:
    """At most `limit` of them: the ends and what lies evenly between them; one alone is the middle."""
    count, last = min(limit, len(windows)), len(windows) - 1
    if count == 1:
        return [windows[len(windows) // 2]]
    return [windows[round(number * last / (count - 1))] for number in range(count)]


def mean_over(points: Sequence[Point], seconds: Sequence[float]) -> float:
    """Mean of a quantity over the whole schedule, from its value at each point."""
    weighted = sum(each * point.steps for point, each in zip(points, seconds, strict=True))
    return weighted / sum(point.steps for point in points)
