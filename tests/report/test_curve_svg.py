"""The picture of benchmarks/demo.py: well-formed, inside its frame, and an error for a run without a curve."""

import importlib.util
from pathlib import Path
from xml.etree import ElementTree

import pytest

from paceline.core.errors import RunError
from report.runs_on_disk import write_run

SVG = "{http://www.w3.org/2000/svg}"
SPEC = importlib.util.spec_from_file_location("curve_svg", Path(__file__).parents[2] / "benchmarks" / "curve_svg.py")
assert SPEC is not None
assert SPEC.loader is not None
curve_svg = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(curve_svg)


def test_the_picture_is_well_formed_and_the_last_validation_lies_at_the_right_edge(tmp_path: Path) -> None:
    root = ElementTree.fromstring(curve_svg.loss_curve_svg(write_run(tmp_path, name="<script>&", steps=500)))
    assert root.findtext(f"{SVG}title") == "Loss of <script>& over its steps"
    circles = list(root.iter(f"{SVG}circle"))
    assert len(circles) == 6
    assert float(circles[-1].attrib["cx"]) == pytest.approx(curve_svg.WIDTH - curve_svg.RIGHT, abs=0.1)
    heights = [float(circle.attrib["cy"]) for circle in circles[1:]]
    assert heights == sorted(heights)  # the loss falls
    assert min(heights) > curve_svg.TOP
    assert max(heights) < curve_svg.HEIGHT - curve_svg.BOTTOM
    assert min(float(circle.attrib["cx"]) for circle in circles) >= curve_svg.LEFT


def test_a_run_without_losses_has_no_picture(tmp_path: Path) -> None:
    run = write_run(tmp_path, done=1)
    with pytest.raises(RunError, match="fewer than two"):
        curve_svg.loss_curve_svg(run)


@pytest.mark.parametrize(("low", "high", "expected"), [
    (0, 500, [0, 100, 200, 300, 400, 500]), (3.2, 5.4, [3.5, 4, 4.5, 5]), (0, 3, [0, 0.5, 1, 1.5, 2, 2.5, 3]),
])  # fmt: skip
def test_ticks_are_round_numbers_inside_the_range(low: float, high: float, expected: list[float]) -> None:
    assert curve_svg.ticks(low, high, 6 if low == 0 else 5) == expected
