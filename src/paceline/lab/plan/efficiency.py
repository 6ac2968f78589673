"""How much of the datasheet's rates a step gets: five numbers a profile, fitted to measured steps. No torch.

A step is linear in the inverse efficiencies, so the fit is one least-squares problem: relative errors of the predicted
steps, and, much weaker, the distance from a start that was read off profiles. The start decides what the figures leave
open (one GPU says nothing about links), the figures the rest.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from paceline.lab.plan.network import exposed_exchange
from paceline.lab.plan.work import Profile, Resource, Setting, Work, computation, optimizer

Efficiencies = Mapping[Resource, float]

STARTS: dict[Profile, dict[Resource, float]] = {
    "reference": {  # record 18's original on one H200, by class of kernel
        "products": 0.74,
        "attention": 0.30,
        "memory": 0.85,
        "newton_schulz": 0.15,  # of what the occupied processors could do
        "link": 0.60,
    },
    "fast": {  # the same with fused kernels
        "products": 0.72,
        "attention": 0.35,
        "memory": 0.85,
        "newton_schulz": 0.40,
        "link": 0.60,
    },
}
TRUST_IN_FIGURES = 0.03
"""Relative error of a measured step that counts as much as ..."""
TRUST_IN_START = 0.25
"""... this relative change of an inverse efficiency."""


@dataclass(frozen=True)
class StepFigure:
    """A measured step."""

    source: str
    setting: Setting
    seconds: float


def step_work(at: Setting) -> list[Work]:
    return [*computation(at), *optimizer(at), *exposed_exchange(at)]


def seconds(work: Iterable[Work], efficiencies: Efficiencies) -> float:
    return sum(item.seconds / efficiencies.get(item.resource, 1.0) for item in work)


def fit(profile: Profile, figures: Sequence[StepFigure]) -> dict[Resource, float]:
    """Efficiencies that predict `figures` best; those of other profiles are left out."""
    import numpy as np

    start = STARTS[profile]
    names = list(start)
    rows, wanted = [], []
    for figure in figures:
        if figure.setting.profile != profile:
            continue
        work = step_work(figure.setting)
        shares = [seconds((w for w in work if w.resource == name), start) / figure.seconds for name in names]
        fixed = sum(w.seconds for w in work if w.resource == "fixed") / figure.seconds
        rows.append([share / TRUST_IN_FIGURES for share in shares])
        wanted.append((1 - fixed) / TRUST_IN_FIGURES)
    rows += (np.eye(len(names)) / TRUST_IN_START).tolist()
    wanted += [1 / TRUST_IN_START] * len(names)
    factors = np.linalg.lstsq(np.array(rows), np.array(wanted), rcond=None)[0]  # on the inverse efficiencies
    return {name: start[name] / max(float(factor), 0.2) for name, factor in zip(names, factors, strict=True)}
