"""The small picture: well-formed, inside its frame, and honest about a run without a curve."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from paceline.core.errors import RunError
from paceline.report.curve_svg import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, loss_curve_svg, ticks
from report.runs_on_disk import write_run

SVG = "{http://www.w3.org/2000/svg}"


def test_the_picture_is_well_formed_and_the_last_validation_lies_at_the_right_edge(tmp_path: Path) -> None:
    root = ElementTree.fromstring(loss_curve_svg(write_run(tmp_path, name="<script>&", steps=500)))
    assert root.findtext(f"{SVG}title") == "Loss of <script>& over its steps"
    circles = list(root.iter(f"{SVG}circle"))
    assert len(circles) == 6
    assert float(circles[-1].attrib["cx"]) == pytest.approx(WIDTH - RIGHT, abs=0.1)
    heights = [float(circle.attrib["cy"]) for circle in circles[1:]]
    assert heights == sorted(heights)  # the loss falls
    assert min(heights) > TOP
    assert max(heights) < HEIGHT - BOTTOM
    assert min(float(circle.attrib["cx"]) for circle in circles) >= LEFT


def test_a_run_without_losses_has_no_picture(tmp_path: Path) -> None:
    run = write_run(tmp_path, done=1)
    with pytest.raises(RunError, match="fewer than two"):
        loss_curve_svg(run)


@pytest.mark.parametrize(("low", "high", "expected"), [
    (0, 500, [0, 100, 200, 300, 400, 500]), (3.2, 5.4, [3.5, 4, 4.5, 5]), (0, 3, [0, 0.5, 1, 1.5, 2, 2.5, 3]),
])  # fmt: skip
def test_ticks_are_round_numbers_inside_the_range(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high, 6 if low == 0 else 5) == expected
