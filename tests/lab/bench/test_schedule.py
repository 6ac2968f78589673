"""Where in a schedule the step is measured, and how the measurements make its mean."""

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from paceline.lab.bench.schedule import Point, mean_over, points_of
from paceline.recipes.presets import PRESETS, preset
from paceline.settings.schedule import StepSettings, schedule


def steps_of(windows: Sequence[int | None], sequences: Sequence[int] | None = None) -> list[StepSettings]:
    """A schedule of these windows, in batches of 8 sequences unless others are given."""
    plain = schedule(preset("r18-softcap"), 0)
    return [
        replace(plain, step=step, sequences=size, windows={} if window is None else {"short": window})
        for step, (window, size) in enumerate(zip(windows, sequences or [8] * len(windows), strict=True))
    ]


def test_every_window_of_a_short_schedule_is_measured_and_weighs_its_steps() -> None:
    found = points_of(steps_of([128, 128, 128, 256, 256, 384]), limit=8)
    assert found == [Point(8, 128, 1, 3), Point(8, 256, 4, 2), Point(8, 384, 5, 1)]
    # (3 x 1.0 + 2 x 1.3 + 1 x 1.6) / 6
    assert mean_over(found, (1.0, 1.3, 1.6)) == pytest.approx(1.2)


def test_windows_that_are_not_measured_count_for_the_nearest_one() -> None:
    windows = [128] * 4 + [256] * 3 + [512] * 2 + [640] * 1
    found = points_of(steps_of(windows), limit=2)
    assert found == [Point(8, 128, 2, 4 + 3), Point(8, 640, 9, 2 + 1)]
    assert mean_over(found, (1.0, 2.0)) == pytest.approx(1.3)


def test_a_single_point_stands_for_the_whole_schedule() -> None:
    assert points_of(steps_of([128, 256, 384]), limit=1) == [Point(8, 256, 1, 3)]


def test_a_preset_without_a_window_has_one_point() -> None:
    assert points_of(steps_of([None] * 5), limit=8) == [Point(8, None, 2, 5)]


def test_every_batch_size_is_measured_at_its_own_windows() -> None:
    found = points_of(steps_of([128, 128, 256, 256, 384], [4, 4, 4, 8, 8]), limit=1)
    assert found == [Point(4, 256, 2, 3), Point(8, 384, 4, 2)]


@functools.cache
def whole_schedule(name: str) -> list[StepSettings]:
    return [schedule(preset(name), step) for step in range(preset(name).steps)]


@pytest.mark.parametrize("limit", [1, 2, 3, 8, 100])
@pytest.mark.parametrize("name", list(PRESETS))
def test_points_cover_every_step_and_keep_both_ends(name: str, limit: int) -> None:
    config, steps = preset(name), whole_schedule(name)
    windows = [(at.sequences, max(at.windows.values(), default=None)) for at in steps]
    found = points_of(steps, limit)
    of_a_size = Counter(size for size, _ in set(windows))
    assert Counter(point.sequences for point in found) == {n: min(limit, count) for n, count in of_a_size.items()}
    assert sum(point.steps for point in found) == config.steps
    assert all(windows[point.step] == (point.sequences, point.window) for point in found)
    if limit > 1:
        assert {windows[0], windows[-1]} <= {(point.sequences, point.window) for point in found}
