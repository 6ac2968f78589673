"""The planner's efficiencies: every measured step that they are fitted on, and the fit. What it prints stands in
`lab/plan/efficiency.py`, so that a plan is the same wherever the package is installed; tests/lab/test_plan.py compares.

    python tools/plan_fit.py

Public: the logs of the records on eight H100. H200: the original script of record 18 and our own steps on one card, on
English text, 524,288 tokens in micro-batches of 65,536; steps with fused kernels in those of 262,144. Steps that were
taken while other processes used the card are not here. What else the planner is held against is in `plan_page.py`.

A step is linear in the inverse efficiencies, so the fit is one least-squares problem: relative errors of the predicted
steps, and, much weaker, the distance from a start that was read off profiles. The start decides what the figures leave
open (one GPU says nothing about links), the figures the rest.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from paceline.core.units import BLOCK_TOKENS
from paceline.lab.plan.efficiency import seconds_by, step_work
from paceline.lab.plan.gpus import Cluster
from paceline.lab.plan.work import Profile, Resource, Setting
from paceline.recipes.presets import preset
from paceline.recipes.scaling import with_steps

PROFILES: dict[str, Profile] = {"original": "reference", "plain": "reference", "fused": "fast"}
"""Of the original script, our compiled paths, and those with fused kernels."""
EIGHT_H100, ONE_H200 = Cluster(gpu="h100", gpus=8), Cluster(gpu="h200", gpus=1)

PUBLIC_STEPS_MS = {
    "r05-modern-arch": 178.89,
    "r14-value-embed": 174.10,
    "r16-block-mask": 157.15,
    "r17-sparse-values": 144.00,
    "r18-softcap": 148.08,  # computes what 17 does, with other compiler settings
}
R18_STEPS_BY_BLOCKS = {
    "original": {1: 0.925, 5: 1.01, 7: 1.04, 14: 1.08},
    "plain": {1: 0.9073, 7: 1.0189, 14: 1.0747},
    "fused": {1: 0.7392, 7: 0.8062, 14: 0.8540},
}
"""Record 18 on one H200."""
R18_MEAN_STEPS = {"original": 1.032, "plain": 1.036}  # over a schedule of 266 steps


@dataclass(frozen=True)
class Figure:
    """A measured step, in seconds, or peak of memory, in GiB."""

    source: str
    setting: Setting
    measured: float


def step_figures() -> list[Figure]:
    """What the efficiencies are fitted on."""
    by_window = [
        own_figure("r18-softcap", whose, step_s, f"window {blocks}", window_tokens=blocks * BLOCK_TOKENS)
        for whose, steps in R18_STEPS_BY_BLOCKS.items()
        for blocks, step_s in steps.items()
    ]
    short = with_steps(preset("r18-softcap"), 266)
    means = [own_figure("r18-softcap", whose, step_s, "mean", config=short) for whose, step_s in R18_MEAN_STEPS.items()]
    return [*public_figures(PUBLIC_STEPS_MS, per_unit=1e3), *by_window, *means]


def public_figures(figures: Mapping[str, float], *, per_unit: float) -> list[Figure]:
    return [
        Figure(f"public log, {name}, 8 H100", _at(name, EIGHT_H100, "original"), figure / per_unit)
        for name, figure in figures.items()
    ]


def own_figure(name: str, whose: str, measured: float, *parts: str, **changes: Any) -> Figure:
    return Figure(", ".join((whose, name, "1 H200", *parts)), replace(_at(name, ONE_H200, whose), **changes), measured)


def _at(name: str, cluster: Cluster, whose: str) -> Setting:
    return Setting(config=preset(name), cluster=cluster, profile=PROFILES[whose])


# ---- the fit

STARTS: dict[Profile, dict[Resource, float]] = {
    "reference": {"products": 0.74, "attention": 0.30, "memory": 0.85, "newton_schulz": 0.15, "link": 0.60},
    "fast": {"products": 0.72, "attention": 0.35, "memory": 0.85, "newton_schulz": 0.40, "link": 0.60},
}
"""Record 18's original on one H200, by class of kernel, and the same with fused kernels; `newton_schulz` is of what the
occupied processors could do."""
TRUST_IN_FIGURES = 0.03  # relative error of a measured step that counts as much as ...
TRUST_IN_START = 0.25  # ... this relative change of an inverse efficiency


def fit(profile: Profile, figures: Sequence[Figure]) -> dict[Resource, float]:
    """Efficiencies that predict `figures` best; those of other profiles are left out."""
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


if __name__ == "__main__":
    for profile in STARTS:
        print(profile, {name: float(f"{value:.5g}") for name, value in fit(profile, step_figures()).items()})
