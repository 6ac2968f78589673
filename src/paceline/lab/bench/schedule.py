"""A step's time depends on the attention window, so it is measured at a few windows of the schedule and averaged with
the schedule's weights. No torch."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Window = int | None
"""In tokens; None where the preset has none."""


@dataclass(frozen=True)
class Point:
    """A window to measure at."""

    window: Window
    step: int
    """A step of the schedule that has this window."""
    steps: int
    """Steps of the schedule for which it stands: those with this window, or whose window is nearest to it."""


def points_of(windows: Sequence[Window], limit: int) -> list[Point]:
    """At most `limit` of the windows that a schedule has at its steps, evenly spaced with both ends among them."""
    distinct = sorted(set(windows), key=_size)
    chosen = [distinct[index] for index in _spread(len(distinct), min(limit, len(distinct)))]
    standing = Counter(min(chosen, key=lambda at: abs(_size(at) - _size(window))) for window in windows)
    return [Point(window, _middle(windows, window), standing[window]) for window in chosen]


def mean_over(points: Sequence[Point], seconds: Mapping[Window, float]) -> float:
    """Mean of a quantity over the whole schedule, from its value at each point."""
    return sum(seconds[point.window] * point.steps for point in points) / sum(point.steps for point in points)


def _size(window: Window) -> int:
    return window or 0


def _spread(length: int, count: int) -> list[int]:
    """`count` indices below `length`: the ends and what lies evenly between them; one alone is the middle."""
    if count == 1:
        return [length // 2]
    return [round(number * (length - 1) / (count - 1)) for number in range(count)]


def _middle(windows: Sequence[Window], window: Window) -> int:
    steps = [step for step, found in enumerate(windows) if found == window]
    return steps[len(steps) // 2]
