"""The tables of docs/plan.md: fitted efficiencies, predictions against every measured figure, GPUs."""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.lab.plan.efficiency import EFFICIENCIES, seconds, step_seconds, step_work
from paceline.lab.plan.gpus import GPUS
from paceline.lab.plan.memory import peak_gib
from paceline.metrics.flops import DENSE_BF16_FLOPS
from page_text import paragraphs, table
from plan_fit import Figure, fit, own_figure, public_figures, step_figures

NUMBERS = "---:"

HELD_OUT_STEPS_MS = {"r04-muon": 216.33, "r13-window-warmup": 160.67, "r15-unet-values": 161.13}
"""Public, and in no fit. Record 4 decided that a head of odd size is slow; 13 and 15 decided nothing."""
PUBLIC_PEAKS_MIB = {"r16-block-mask": 34_239, "r17-sparse-values": 31_361, "r18-softcap": 31_563}
H200_PEAKS_GIB = {
    "original": {"r18-softcap": 31.1},
    "plain": {"r18-softcap": 31.3, "r16-block-mask": 33.3, "r14-value-embed": 35.6, "r05-modern-arch": 30.8},
    "fused": {"r18-softcap": 20.41},
}
"""Peaks of 37 GiB that the first runs of records 17 and 18 had are not here: later code needs 31 for the same."""


@dataclass(frozen=True)
class Check:
    """A measured figure and its predictions: by the planner, and, where something is fitted, by a fit that has seen no
    figure of that record."""

    source: str
    measured: float
    predicted: tuple[float, ...]

    @property
    def errors(self) -> list[float]:
        return [value / self.measured - 1 for value in self.predicted]


def step_checks() -> list[Check]:
    figures, checks = step_figures(), []
    for figure in [*figures, *public_figures(HELD_OUT_STEPS_MS, per_unit=1e3)]:
        others = [other for other in figures if other.setting.config.preset != figure.setting.config.preset]
        unseen = seconds(step_work(figure.setting), fit(figure.setting.profile, others))
        checks.append(Check(figure.source, figure.measured, (step_seconds(figure.setting), unseen)))
    return checks


def memory_checks() -> list[Check]:
    own = [own_figure(name, whose, gib) for whose, peaks in H200_PEAKS_GIB.items() for name, gib in peaks.items()]
    figures: list[Figure] = [*public_figures(PUBLIC_PEAKS_MIB, per_unit=1024), *own]
    return [Check(figure.source, figure.measured, (peak_gib(figure.setting),)) for figure in figures]


def efficiencies(_: str) -> str:
    rows = [(f"`{profile}`", *(f"{value:.2f}" for value in found.values())) for profile, found in EFFICIENCIES.items()]
    return table(("profile", *(f"`{name}`" for name in EFFICIENCIES["fast"])), rows, NUMBERS)


def errors(_: str) -> str:
    steps = _errors(("step, s", "measured", "predicted", "record unseen"), step_checks(), 4)
    return paragraphs(steps, _errors(("peak, GiB", "measured", "predicted"), memory_checks(), 2))


def _errors(headings: Sequence[str], checks: Sequence[Check], digits: int) -> str:
    rows = []
    for check in checks:
        pairs = zip(check.predicted, check.errors, strict=True)
        predicted = [f"{value:.{digits}f} ({error:+.1%})" for value, error in pairs]
        rows.append((check.source, f"{check.measured:.{digits}f}", *predicted))
    return table(headings, rows, NUMBERS)


def gpus(_: str) -> str:
    headings = ("`--gpu`", "bf16 TFLOP/s", "memory GB/s", "memory GiB", "link GB/s", "node GB/s", "USD an hour")
    rows = []
    for name, gpu in GPUS.items():
        peak = DENSE_BF16_FLOPS[gpu.driver_name] / 1e12
        rates = (peak, gpu.memory_gb_s, gpu.memory_gib, gpu.link_gb_s, gpu.node_gb_s)
        rows.append((f"`{name}`", *(f"{rate:g}" for rate in rates), f"{gpu.price:.2f}"))
    return table(headings, rows, NUMBERS)
