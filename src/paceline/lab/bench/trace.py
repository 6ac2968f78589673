"""Shares of a step from a profiler's trace, in the Chrome format, which is the profiler's one stable output. No torch.

On a GPU the kernels count, each with what launched it; where two overlap, the time is given to the one that started
first, so that classes and idle time add up to the whole. On a CPU operations nest, and each counts without those
inside it.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.lab.bench.classes import CLASSES, Sizes, Work, class_of

STEPS_RANGE = "paceline: steps"
"""Range around all profiled steps, from an idle device to an idle device."""
PHASE_RANGES = {"paceline: data": "data", "paceline: optimizer": "optimizer"}
"""Ranges inside a step and the class of everything that is launched in them."""
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of what a GPU does."""
TOP_KERNELS = 25
"""Rows of the list by which a person sees where the time goes."""


@dataclass(frozen=True)
class Timed:
    """Work and the seconds that it alone is charged with."""

    work: Work
    seconds: float


@dataclass(frozen=True)
class Profile:
    """All profiled steps together."""

    wall_s: float
    timed: tuple[Timed, ...]


def read_trace(events: Iterable[dict[str, Any]]) -> Profile:
    """From the `traceEvents` of a trace that has STEPS_RANGE and the PHASE_RANGES in it."""
    spans = [event for event in events if event.get("ph") == "X"]
    ranges = [event for event in spans if event.get("cat") == "user_annotation"]
    whole = next(event for event in ranges if event["name"] == STEPS_RANGE)
    phases = [(_start(e), _end(e), PHASE_RANGES[e["name"]]) for e in ranges if e["name"] in PHASE_RANGES]
    inside = [e for e in spans if _start(whole) <= _start(e) <= _end(whole)]
    kernels = [event for event in inside if event.get("cat") in ON_DEVICE]
    if kernels:
        timed = _of_kernels(kernels, spans, phases)
    else:
        timed = _of_operations([event for event in inside if _is_operation(event)], phases)
    return Profile(wall_s=whole["dur"] / 1e6, timed=tuple(timed))


def _is_operation(event: dict[str, Any]) -> bool:
    """Reading data counts as one, though the framework does not see it."""
    return event.get("cat") == "cpu_op" or PHASE_RANGES.get(event["name"]) == "data"


def shares(profile: Profile, sizes: Sizes) -> dict[str, float]:
    """Class to its share of the wall time; the sum is 1."""
    seconds = dict.fromkeys(CLASSES, 0.0)
    for item in profile.timed:
        seconds[class_of(item.work, sizes)] += item.seconds
    seconds["idle"] = max(0.0, profile.wall_s - sum(seconds.values()))
    total = sum(seconds.values())
    return {name: value / total for name, value in seconds.items()}


def top_kernels(profile: Profile, sizes: Sizes, *, steps: int, limit: int = TOP_KERNELS) -> list[dict[str, Any]]:
    """The longest by name and class, with calls and seconds of one step."""
    rows: dict[tuple[str, str], list[float]] = defaultdict(list)
    for item in profile.timed:
        rows[item.work.name, class_of(item.work, sizes)].append(item.seconds)
    longest = sorted(rows.items(), key=lambda row: -sum(row[1]))[:limit]
    return [
        {"name": name, "class": kind, "calls": len(each) / steps, "seconds": sum(each) / steps}
        for (name, kind), each in longest
    ]


Phases = Sequence[tuple[float, float, str]]
"""(first, last, phase), in the trace's microseconds."""


def _of_kernels(kernels: list[dict[str, Any]], spans: list[dict[str, Any]], phases: Phases) -> list[Timed]:
    operations = {_argument(e, "External id"): e for e in spans if e.get("cat") == "cpu_op"}
    launches = {_argument(e, "correlation"): e for e in spans if str(e.get("cat")) in ("cuda_runtime", "cuda_driver")}
    timed, covered = [], float("-inf")
    for kernel in sorted(kernels, key=_start):
        operation = operations.get(_argument(kernel, "External id"), {})
        launch = launches.get(_argument(kernel, "correlation"), operation or kernel)
        work = _work(str(kernel["name"]), operation, _phase_at(_start(launch), phases))
        timed.append(Timed(work, max(0.0, _end(kernel) - max(_start(kernel), covered)) / 1e6))
        covered = max(covered, _end(kernel))
    return timed


def _of_operations(operations: list[dict[str, Any]], phases: Phases) -> list[Timed]:
    """Each operation without those that it called on the same thread."""
    ordered = sorted(operations, key=lambda event: (str(event.get("tid")), _start(event), -_end(event)))
    own_us = [float(event["dur"]) for event in ordered]
    callers: list[int] = []  # those that are still running when the next one starts, innermost last
    for index, event in enumerate(ordered):
        while callers and not _contains(ordered[callers[-1]], event):
            callers.pop()
        if callers:
            own_us[callers[-1]] -= event["dur"]
        callers.append(index)
    return [
        Timed(_work(str(event["name"]), event, _phase_at(_start(event), phases)), max(0.0, us) / 1e6)
        for event, us in zip(ordered, own_us, strict=True)
    ]


def _contains(outer: dict[str, Any], inner: dict[str, Any]) -> bool:
    return outer.get("tid") == inner.get("tid") and _start(inner) < _end(outer)


def _work(name: str, operation: dict[str, Any], phase: str) -> Work:
    dims = (operation.get("args") or {}).get("Input Dims") or ()
    shapes = tuple(tuple(shape) for shape in dims if shape and all(isinstance(side, int) for side in shape))
    return Work(name=name, operation=str(operation.get("name", "")), shapes=shapes, phase=phase)


def _phase_at(time_us: float, phases: Phases) -> str:
    return next((phase for first, last, phase in phases if first <= time_us <= last), "")


def _argument(event: dict[str, Any], name: str) -> Any:
    return (event.get("args") or {}).get(name)


def _start(event: dict[str, Any]) -> float:
    return float(event["ts"])


def _end(event: dict[str, Any]) -> float:
    return float(event["ts"]) + float(event["dur"])
