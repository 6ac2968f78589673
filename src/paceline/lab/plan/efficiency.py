"""How much of the datasheet's rates a step gets: five numbers a profile, fitted to measured steps. No torch.

A step is linear in the inverse efficiencies, so the fit is one least-squares problem: relative errors of the predicted
steps, and, much weaker, the distance from a start that was read off profiles. The start decides what the figures leave
open (one GPU says nothing about links), the figures the rest.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from paceline.lab.plan.figures import Figure
from paceline.lab.plan.network import exchange
from paceline.lab.plan.work import Profile, Resource, Setting, Work, computation, optimizer

Efficiencies = Mapping[Resource, float]

STARTS: dict[Profile, dict[Resource, float]] = {
    "reference": {"products": 0.74, "attention": 0.30, "memory": 0.85, "newton_schulz": 0.15, "link": 0.60},
    "fast": {"products": 0.72, "attention": 0.35, "memory": 0.85, "newton_schulz": 0.40, "link": 0.60},
}
"""Record 18's original on one H200, by class of kernel, and the same with fused kernels; `newton_schulz` is of what the
occupied processors could do."""
TRUST_IN_FIGURES = 0.03  # relative error of a measured step that counts as much as ...
TRUST_IN_START = 0.25  # ... this relative change of an inverse efficiency


def step_work(at: Setting) -> list[Work]:
    return [*computation(at), *optimizer(at), *exchange(at, exposed=True)]


def seconds(work: Iterable[Work], efficiencies: Efficiencies) -> float:
    return sum(item.seconds / efficiencies.get(item.resource, 1.0) for item in work)


def seconds_by(
    field: Literal["kind", "resource"], work: Iterable[Work], efficiencies: Efficiencies
) -> dict[str, float]:
    """The same for each kind of work or each resource."""
    sums: defaultdict[str, float] = defaultdict(float)
    for item in work:
        sums[getattr(item, field)] += seconds([item], efficiencies)
    return dict(sums)


def fit(profile: Profile, figures: Sequence[Figure]) -> dict[Resource, float]:
    """Efficiencies that predict `figures` best; those of other profiles are left out."""
    import numpy as np

    start = STARTS[profile]
    names = list(start)
    rows, wanted = [], []
    for figure in figures:
        if figure.setting.profile != profile:
            continue
        known = seconds_by("resource", step_work(figure.setting), start)
        rows.append([known.get(name, 0.0) / figure.measured / TRUST_IN_FIGURES for name in names])
        wanted.append((1 - known.get("fixed", 0.0) / figure.measured) / TRUST_IN_FIGURES)
    rows += (np.eye(len(names)) / TRUST_IN_START).tolist()
    wanted += [1 / TRUST_IN_START] * len(names)
    factors = np.linalg.lstsq(np.array(rows), np.array(wanted), rcond=None)[0]  # on the inverse efficiencies
    return {name: start[name] / max(float(factor), 0.2) for name, factor in zip(names, factors, strict=True)}
