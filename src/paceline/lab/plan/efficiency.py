"""How much of the datasheet's rates a step gets: numbers fitted to measured steps by tools/plan_fit.py. No torch."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Literal

from paceline.lab.plan.network import exchange
from paceline.lab.plan.work import Profile, Resource, Setting, Work, computation, optimizer

Efficiencies = Mapping[Resource, float]

EFFICIENCIES: dict[Profile, dict[Resource, float]] = {
    "reference": {
        "products": 0.656656,
        "attention": 0.293795,
        "memory": 0.926098,
        "newton_schulz": 0.198944,
        "link": 0.591611,
    },
    "fast": {"products": 0.73446, "attention": 0.39228, "memory": 0.85512, "newton_schulz": 0.40006, "link": 0.6},
}


def step_work(at: Setting) -> list[Work]:
    return [*computation(at), *optimizer(at), *exchange(at, exposed=True)]


def seconds(work: Iterable[Work], efficiencies: Efficiencies) -> float:
    return sum(item.seconds / efficiencies.get(item.resource, 1.0) for item in work)


def step_seconds(at: Setting) -> float:
    return seconds(step_work(at), EFFICIENCIES[at.profile])


def seconds_by(
    field: Literal["kind", "resource"], work: Iterable[Work], efficiencies: Efficiencies
) -> dict[str, float]:
    """The same for each kind of work or each resource."""
    sums: defaultdict[str, float] = defaultdict(float)
    for item in work:
        sums[getattr(item, field)] += seconds([item], efficiencies)
    return dict(sums)
