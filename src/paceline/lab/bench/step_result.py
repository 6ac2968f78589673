"""The figures of `paceline bench step` from what was measured."""

from typing import Any

from paceline.core.units import BLOCK_TOKENS
from paceline.lab.bench.classes import Sizes
from paceline.lab.bench.schedule import mean_over
from paceline.lab.bench.shapes import mean_step_flops
from paceline.lab.bench.silence import exposed_s
from paceline.lab.bench.steps import PROFILED_STEPS, StepTimes, WindowTime
from paceline.lab.bench.trace import Profile, shares, top_kernels
from paceline.train.config import RunConfig

GIB = 2**30
COMMUNICATION = ("exposed_communication_s", "communication_share")
"""Seconds of a step that are communication and not hidden (`silence.exposed_s`), and their share; as in a plan."""


PEAKS = ("peak_gib", "peak_gib_as_timed")
"""Peak memory in micro-batches of 65,536 tokens at most, by which records are compared (a run of its own measures it
where the timed steps were larger and starts are measured), and that of the timed steps."""


def figures_of_times(
    config: RunConfig, times: StepTimes | None, silent: StepTimes | None, peak_flops_per_s: float, ranks: int
) -> dict[str, Any]:
    """`silent`: the same steps without exchanges, if there are several ranks."""
    floor_s = mean_step_flops(config) / peak_flops_per_s / ranks
    known: dict[str, Any] = {"ranks": ranks, "floor_s": floor_s, "peak_tflops": peak_flops_per_s / 1e12}
    if times is None:
        missing = ("step_s", "tokens_per_s", "mfu", *PEAKS, "sm_clock_mhz", "power_w", *COMMUNICATION)
        return {**dict.fromkeys(missing), **known, "windows": []}
    step_s = _mean_step_s(times)
    exposed = None if silent is None else exposed_s(step_s, _mean_step_s(silent))
    shares = None if exposed is None else exposed / step_s
    return {
        "step_s": step_s,
        **dict(zip(COMMUNICATION, (exposed, shares), strict=True)),
        "tokens_per_s": config.batch.tokens / step_s,
        "mfu": floor_s / step_s,
        **dict.fromkeys(PEAKS, None if times.peak_bytes is None else times.peak_bytes / GIB),
        **known,
        "sm_clock_mhz": times.card.sm_clock_mhz,
        "power_w": times.card.power_w,
        "windows": [_row(time) for time in times.windows],
    }


def _mean_step_s(times: StepTimes) -> float:
    """Over the schedule."""
    return mean_over([t.point for t in times.windows], {t.point.window: t.seconds for t in times.windows})


def _row(time: WindowTime) -> dict[str, Any]:
    window = time.point.window
    return {
        "blocks": None if window is None else window / BLOCK_TOKENS,
        "tokens": window,
        "steps": time.point.steps,
        "seconds": time.seconds,
        "spread_s": time.spread_s,
    }


def figures_of_profile(profile: Profile | None, sizes: Sizes) -> dict[str, Any]:
    if profile is None:
        return {"profiled_step_s": None, "shares": None, "kernels": []}
    return {
        "profiled_step_s": profile.wall_s / PROFILED_STEPS,
        "shares": shares(profile, sizes),
        "kernels": top_kernels(profile, sizes, steps=PROFILED_STEPS),
    }
