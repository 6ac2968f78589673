"""Every measured step that the planner is fitted on. What else it is held against is in `tools/plan_page.py`. No torch.

Public: the logs of the records on eight H100. H200: the original script of record 18 and our own steps on one card, on
English text, 524,288 tokens in micro-batches of 65,536; steps with fused kernels in those of 262,144. Steps that were
taken while other processes used the card are not here. The figures are kept here and not read from result files, so
that the fit is the same wherever the package is installed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from paceline.core.units import BLOCK_TOKENS
from paceline.lab.plan.gpus import Cluster
from paceline.lab.plan.work import Profile, Setting
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
