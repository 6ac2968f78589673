"""An ablation's folder as the lab leaves it: runs of three arms and `ablation.json`, its numbers made by hand."""

from pathlib import Path
from typing import Any

from paceline.core.files import write_json
from report.runs_on_disk import write_run

SEEDS = (1, 2, 3)
ARMS = {
    "full": ("full", None, 3.20, 15.0),
    "without-softcap": ("without", "softcap", 3.23, 30.0),
    "base": ("base", None, 3.26, 60.0),
}
"""Name to kind, technique, the loss that its curve falls towards, and its logit cap."""


def estimate(mean: float, half: float, p: float = 0.003) -> dict[str, float]:
    return {"mean": mean, "low": mean - half, "high": mean + half, "p": p, "p_holm": min(1.0, 4 * p)}


def effect(technique: str, title: str, kind: str, mean: float, half: float, **others: Any) -> dict[str, Any]:
    noise = abs(mean) < half
    values = {
        "technique": technique,
        "title": title,
        "kind": kind,
        "n": len(SEEDS),
        "loss": estimate(mean, half, 0.4 if noise else 0.003),
        "time_at_equal_loss_s": None,
        "step_s": estimate(0.0004, 0.0012, 0.5),
        "memory_gib": None,
        "noise": noise,
        "words": f"{title} changes the loss by {mean:+.4f}.",
    }
    return {**values, **others}


EFFECTS = [
    effect("softcap", "Softcap 15", "leave-one-out", -0.031, 0.009, time_at_equal_loss_s=estimate(-6.1, 2.2)),
    effect("softcap", "Softcap 15", "add-one-in", -0.027, 0.011, memory_gib=estimate(0.0, 0.01, 0.9)),
    effect("rotary-fp32", "Rotary tables in fp32", "leave-one-out", -0.002, 0.006),
    effect("padding", "Vocabulary padded to 128", "leave-one-out", 0.004, 0.005),
]
WATERFALL = [
    {"label": "r17-sparse-values", "value": 3.262, "kind": "start"},
    {"label": "Softcap 15", "value": -0.031, "kind": "step"},
    {"label": "Rotary tables in fp32", "value": -0.002, "kind": "step"},
    {"label": "Vocabulary padded to 128", "value": 0.004, "kind": "step"},
    {"label": "interaction", "value": -0.003, "kind": "interaction"},
    {"label": "r18-softcap", "value": 3.23, "kind": "end"},
]


def write_ablation(folder: Path, **changed: Any) -> Path:
    arms = []
    for name, (kind, technique, floor, softcap) in ARMS.items():
        runs = [f"{name}-{seed}" for seed in SEEDS]
        for run, seed in zip(runs, SEEDS, strict=True):
            write_run(folder / run, name=run, steps=120, seed=seed, floor=floor + 0.004 * seed, softcap=softcap)
        arms.append({"name": name, "kind": kind, "technique": technique, "runs": runs})
    values = {
        "format": 1,
        "preset": "r18-softcap",
        "against": "r17-sparse-values",
        "scale": "1/16",
        "indicative": True,
        "why_indicative": "scale 1/16, CPU",
        "steps": 120,
        "seeds": list(SEEDS),
        "hardware": "A processor",
        "made": "2025-01-04T10:00:00+00:00",
        "arms": arms,
        "effects": EFFECTS,
        "waterfall": WATERFALL,
        "exchange": {"steps_per_loss": 610.0, "at_step": 120},
    }
    write_json(folder / "ablation.json", {**values, **changed})
    return folder
