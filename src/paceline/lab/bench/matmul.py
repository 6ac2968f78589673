"""Timing without waits, and how fast this machine multiplies at best."""

import itertools
import statistics
import time
from collections.abc import Callable

import torch

from paceline.train.assemble import Machine

PEAK_SIDE = {"cuda": 8192, "cpu": 1024}
"""Side of the square product whose rate counts as the device's peak: large enough that nothing but the product is
measured."""


def measured_peak(machine: Machine, *, repeats: int = 20) -> float:
    """FLOP/s of a large square product of random matrices, in bf16 where the machine has it, else in fp32."""
    side, dtype = PEAK_SIDE[machine.device.type], torch.bfloat16 if machine.bf16 else torch.float32
    a, b = (torch.randn(side, side, device=machine.device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * side**3 / median_seconds(lambda: torch.mm(a, b, out=out), machine.device, repeats=repeats)


def median_seconds(work: Callable[[], object], device: torch.device, *, repeats: int, warm_up: int = 3) -> float:
    """Median time of one call. On a GPU the calls are queued without a wait between them."""
    for _ in range(warm_up):
        work()
    marks = [mark(device)]
    for _ in range(repeats):
        work()
        marks.append(mark(device))
    return statistics.median(seconds_between(marks))


Mark = torch.cuda.Event | float
"""A place in the device's queue, or on a CPU a time."""


def mark(device: torch.device) -> Mark:
    """Does not wait."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(marks: list[Mark]) -> list[float]:
    """From each mark to the next. Waits for the last."""
    if isinstance(marks[-1], torch.cuda.Event):
        marks[-1].synchronize()
    return [_seconds(first, second) for first, second in itertools.pairwise(marks)]


def _seconds(first: Mark, second: Mark) -> float:
    if isinstance(first, torch.cuda.Event) and isinstance(second, torch.cuda.Event):
        return float(first.elapsed_time(second)) / 1e3
    assert isinstance(first, float)
    assert isinstance(second, float)
    return second - first
