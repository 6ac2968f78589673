"""Shares of a step from a profiler's trace, in the Chrome format, which is the profiler's one stable output. No torch.

On a GPU the kernels count, each with what launched it; where two overlap, the time is given to the one that started
first, so that classes and idle time add up to the whole. On a CPU each operation counts without those inside it.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from paceline.lab.bench.classes import CLASSES, Sizes, Work, class_of

STEPS_RANGE = "paceline: steps"  # range around all profiled steps, from an idle device to an idle device
PHASE_RANGES = {"paceline: data": "data", "paceline: optimizer": "optimizer"}
"""Ranges inside a step and the class of everything that is launched in them."""
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of what a GPU does
TOP_KERNELS = 25  # rows of the list by which a person sees where the time goes

Event = dict[str, Any]
Phases = Sequence[tuple[float, float, str]]  # (first, last, phase), in the trace's microseconds


class Profile(NamedTuple):
    """All profiled steps together."""

    wall_s: float
    work: list[Work]


def read_trace(events: Iterable[Event]) -> Profile:
    """From the `traceEvents` of a trace that has STEPS_RANGE and the PHASE_RANGES in it."""
    spans = [event for event in events if event.get("ph") == "X"]
    ranges = [event for event in spans if event.get("cat") == "user_annotation"]
    whole = next(event for event in ranges if event["name"] == STEPS_RANGE)
    phases = [(_start(e), _end(e), PHASE_RANGES[e["name"]]) for e in ranges if e["name"] in PHASE_RANGES]
    inside = [e for e in spans if _start(whole) <= _start(e) <= _end(whole)]
    if kernels := [event for event in inside if event.get("cat") in ON_DEVICE]:
        return Profile(whole["dur"] / 1e6, _of_kernels(kernels, spans, phases))
    reading = [event for event in inside if PHASE_RANGES.get(event["name"]) == "data"]  # unseen by the framework
    operations = [*reading, *(event for event in inside if event.get("cat") == "cpu_op")]
    return Profile(whole["dur"] / 1e6, _of_operations(operations, phases))


def shares(profile: Profile, sizes: Sizes) -> dict[str, float]:
    """Class to its share of the wall time; the sum is 1."""
    seconds = dict.fromkeys(CLASSES, 0.0)
    for work in profile.work:
        seconds[class_of(work, sizes)] += work.seconds
    seconds["idle"] = max(0.0, profile.wall_s - sum(seconds.values()))
    total = sum(seconds.values())
    return {name: value / total for name, value in seconds.items()}


def top_kernels(profile: Profile, sizes: Sizes, *, steps: int, limit: int = TOP_KERNELS) -> list[dict[str, Any]]:
    """The longest by name and class, with calls and seconds of one step."""
    seconds: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for work in profile.work:
        seconds[work.name, class_of(work, sizes)].append(work.seconds)
    rows: list[dict[str, Any]] = [
        {"name": name, "class": kind, "calls": len(each) / steps, "seconds": sum(each) / steps}
        for (name, kind), each in seconds.items()
    ]
    return sorted(rows, key=lambda row: -row["seconds"])[:limit]


def _of_kernels(kernels: list[Event], spans: list[Event], phases: Phases) -> list[Work]:
    operations = {_argument(e, "External id"): e for e in spans if e.get("cat") == "cpu_op"}
    launches = {_argument(e, "correlation"): e for e in spans if e.get("cat") in ("cuda_runtime", "cuda_driver")}
    found, covered = [], float("-inf")
    for kernel in sorted(kernels, key=_start):
        operation = operations.get(_argument(kernel, "External id"), {})
        launch = launches.get(_argument(kernel, "correlation"), operation or kernel)
        own_us = _end(kernel) - max(_start(kernel), covered)
        found.append(_work(kernel["name"], operation, _phase_at(_start(launch), phases), own_us))
        covered = max(covered, _end(kernel))
    return found


def _of_operations(operations: list[Event], phases: Phases) -> list[Work]:
    """Each operation without those that it called on the same thread."""
    ordered = sorted(operations, key=lambda event: (str(event.get("tid")), _start(event), -_end(event)))
    own_us = [float(event["dur"]) for event in ordered]
    callers: list[int] = []  # those that are still running when the next one starts, innermost last
    for index, event in enumerate(ordered):
        while callers and not _calls(ordered[callers[-1]], event):
            callers.pop()
        if callers:
            own_us[callers[-1]] -= event["dur"]
        callers.append(index)
    return [
        _work(event["name"], event, _phase_at(_start(event), phases), us)
        for event, us in zip(ordered, own_us, strict=True)
    ]


def _calls(outer: Event, inner: Event) -> bool:
    return outer.get("tid") == inner.get("tid") and _start(inner) < _end(outer)


def _work(name: str, operation: Event, phase: str, own_us: float) -> Work:
    dims = _argument(operation, "Input Dims") or ()
    shapes = tuple(tuple(shape) for shape in dims if shape and all(isinstance(side, int) for side in shape))
    return Work(str(name), str(operation.get("name", "")), shapes, phase, max(0.0, own_us) / 1e6)


def _phase_at(time_us: float, phases: Phases) -> str:
    return next((phase for first, last, phase in phases if first <= time_us <= last), "")


def _argument(event: Event, name: str) -> Any:
    return (event.get("args") or {}).get(name)


def _start(event: Event) -> float:
    return float(event["ts"])


def _end(event: Event) -> float:
    return float(event["ts"]) + float(event["dur"])
