"""A loss curve as a small SVG without a script or a library, for places that show pictures only (a README).

Its colours are greys and one blue that read on white and on black, and change with the reader's scheme where the
viewer allows it. The frame leaves out the first steps, whose fall would flatten everything after them.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paceline.core.errors import RunError
from paceline.report.curves import Column
from paceline.report.markup import Markup, element
from paceline.report.subject import Run, load_runs

WIDTH, HEIGHT = 720, 300
LEFT, RIGHT, TOP, BOTTOM = 52, 16, 16, 40
START_SHARE = 0.08
"""Share of the run at its start that may lie above the frame."""
MAX_POINTS = 400
"""Of one line: more would be closer than a pixel and a half."""

STYLE = """
text{font:12px system-ui,sans-serif;fill:#6b7680}
.grid{stroke:#8a949e;stroke-opacity:.25}
.each{fill:none;stroke:#3b82d6;stroke-opacity:.3}
.mean{fill:none;stroke:#3b82d6;stroke-width:2}
.val{fill:#fff;stroke:#3b82d6;stroke-width:2}
@media (prefers-color-scheme:dark){text{fill:#9aa4ae}.val{fill:#14171a}}
@media (max-width:480px){text{font-size:20px}.mean,.val{stroke-width:3}}
"""


@dataclass(frozen=True, kw_only=True)
class Frame:
    """What part of the plane is shown: steps from 0 to `steps`, losses from `low` to `high`."""

    steps: float
    low: float
    high: float

    def at(self, step: float, loss: float) -> tuple[float, float]:
        x = LEFT + (WIDTH - LEFT - RIGHT) * step / self.steps
        return x, TOP + (HEIGHT - TOP - BOTTOM) * (self.high - loss) / (self.high - self.low)


def loss_curve_svg(folder: Path) -> str:
    """Training loss, raw and smoothed, and the validations of the run in `folder`."""
    [run], _ = load_runs([(folder, None)])
    losses = run.curves.steps["train_loss"]
    if np.isfinite(losses).sum() < 2:
        raise RunError(f"{folder}: holds fewer than two training losses, so there is no curve to draw yet")
    steps, mean = run.curves.steps["step"], run.smooth_loss
    frame = _frame(steps, losses, mean)
    drawn = element(
        "g",
        _line(frame, steps, losses, "each"),
        _line(frame, steps, mean, "mean"),
        *_validations(frame, run),
        clip_path="url(#frame)",
    )
    label = f"Loss of {run.label} over its steps"
    parts = [element("title", label), element("style", Markup(STYLE)), _clip(), *_axes(frame), drawn]
    box = {"viewBox": f"0 0 {WIDTH} {HEIGHT}", "width": str(WIDTH), "height": str(HEIGHT)}
    return element("svg", *parts, xmlns="http://www.w3.org/2000/svg", role="img", aria_label=label, **box)


def _frame(steps: Column, losses: Column, mean: Column) -> Frame:
    late = mean[(steps >= START_SHARE * steps[-1]) & np.isfinite(mean)]
    low = float(np.nanmin(losses))
    high = max(late.tolist(), default=low)
    margin = 0.05 * (high - low) or 0.5
    return Frame(steps=float(steps[-1]), low=low - margin, high=high + margin)


def _clip() -> Markup:
    inside = element(
        "rect", x=str(LEFT), y=str(TOP), width=str(WIDTH - LEFT), height=str(HEIGHT - TOP - BOTTOM + 6)
    )  # to the right edge and a little below, so that the last marker is whole
    return element("clipPath", inside, id="frame")


def _line(frame: Frame, steps: Column, values: Column, kind: str) -> Markup:
    stride = max(1, -(-len(steps) // MAX_POINTS))
    points = [frame.at(s, v) for s, v in list(zip(steps, values, strict=True))[::stride] if np.isfinite(v)]
    return element("path", d="M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points), class_=kind)


def _validations(frame: Frame, run: Run) -> list[Markup]:
    evals = run.curves.evals
    places = [frame.at(s, v) for s, v in zip(evals["step"], evals["val_loss"], strict=True) if np.isfinite(v)]
    return [element("circle", cx=f"{x:.1f}", cy=f"{y:.1f}", r="4", class_="val") for x, y in places]


def _axes(frame: Frame) -> list[Markup]:
    """Horizontal grid lines with the loss, step numbers below, and what the two are."""
    parts = []
    for loss in ticks(frame.low, frame.high, 5):
        _, y = frame.at(0, loss)
        parts.append(element("path", d=f"M{LEFT} {y:.1f}H{WIDTH - RIGHT}", class_="grid"))
        parts.append(_text(f"{loss:g}", LEFT - 8, y + 4, "end"))
    for step in ticks(0, frame.steps, 6):
        x, _ = frame.at(step, frame.low)
        parts.append(_text(f"{step:,.0f}", x, HEIGHT - BOTTOM + 18, "middle"))
    parts.append(_text("steps", WIDTH - RIGHT, HEIGHT - 6, "end"))
    parts.append(_text("loss, nats per token (circles: validation)", WIDTH - RIGHT, TOP + 8, "end"))
    return parts


def _text(text: str, x: float, y: float, anchor: str) -> Markup:
    return element("text", text, x=f"{x:.1f}", y=f"{y:.1f}", text_anchor=anchor)


def ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` round numbers (1, 2 or 5 times a power of ten apart) between `low` and `high`."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * next(factor for factor in (1, 2, 5, 10) if factor * power >= rough)
    first = math.ceil(low / step - 1e-9)
    return [round(k * step, 10) for k in range(first, math.floor(high / step + 1e-9) + 1)]
