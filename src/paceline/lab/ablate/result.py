"""`ablation.json`: what an ablation was, on what it ran, and what it found. Pages and the ledger read this file."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from paceline.core.files import write_json
from paceline.lab.ablate.effects import ArmResult, Effect, arm_results, effects_of, exchange_of, waterfall
from paceline.lab.ablate.outcomes import Outcome
from paceline.lab.ablate.plan import Plan
from paceline.metrics.card import RunCard
from paceline.recipes.presets import preset
from paceline.train.config import RunConfig

ABLATION_FILE = "ablation.json"
FORMAT = 1


@dataclass(frozen=True)
class Ablation:
    plan: Plan
    results: dict[str, ArmResult]
    effects: list[Effect]
    not_counted: list[tuple[str, str]]
    """Runs and why they are left out of every mean."""
    hardware: str
    why_indicative: str | None
    made: str

    @property
    def waterfall(self) -> list[dict[str, Any]]:
        """Bars from the older config's loss to the newer one's, each with label, value and kind."""
        return waterfall(self.plan, self.results, self.effects)

    def as_json(self) -> dict[str, Any]:
        plan, choice = self.plan, self.plan.choice
        against, newer = plan.names
        return {
            "format": FORMAT,
            "preset": newer,
            "against": against,
            "scale": None if choice.scale == "1" else choice.scale,
            "indicative": self.why_indicative is not None,
            "why_indicative": self.why_indicative,
            "steps": plan.full.steps,
            "seeds": plan.seeds,
            "hardware": self.hardware,
            "made": self.made,
            "arms": [_arm_json(result, choice.rates) for result in self.results.values()],
            "left_out": [{"arm": name, "why": why} for name, why in plan.left_out],
            "not_counted": [{"run": name, "why": why} for name, why in self.not_counted],
            "effects": [_effect_json(effect) for effect in self.effects],
            "waterfall": self.waterfall,
            "exchange": exchange_of(self.results.get("full")),
        }


def _arm_json(result: ArmResult, rates: bool) -> dict[str, Any]:
    arm = result.arm
    values = {
        "name": arm.name,
        "kind": arm.kind,
        "technique": None if arm.part is None else arm.part.key,
        "runs": list(result.folders.values()),
        "losses": [card.val_loss for card in result.cards.values()],
    }
    tried = {f"{rate:g}": loss for rate, loss in sorted(result.tried.items())}
    return {**values, "rate": result.rate, "mean_loss_by_rate": tried} if rates else values


def _effect_json(effect: Effect) -> dict[str, Any]:
    return {**asdict(effect), "noise": effect.noise, "words": effect.words}


def conclude(plan: Plan, found: Sequence[Outcome], failed: dict[str, str]) -> Ablation:
    """What the finished runs say."""
    results = arm_results(plan, found)
    cards = [card for result in results.values() for card in result.cards.values()]
    refused = [(one.run.name, one.reason or "") for one in found if one.state == "refused"]
    missing = [(one.run.name, failed.get(one.run.name, "is not finished")) for one in found if one.state not in DONE]
    return Ablation(
        plan=plan,
        results=results,
        effects=effects_of(results),
        not_counted=refused + missing,
        hardware=", ".join(sorted({hardware_of(card) for card in cards})),
        why_indicative=_why_indicative(plan, cards),
        made=datetime.now(UTC).isoformat(timespec="seconds"),
    )


DONE = ("finished", "refused")


def hardware_of(card: RunCard) -> str:
    facts = card.environment
    if card.device == "cuda":
        return f"{card.ranks} x {facts.get('gpu', 'GPU')}"
    return f"{facts.get('cores', '?')} cores of {facts.get('cpu', 'a CPU')}"


def _why_indicative(plan: Plan, cards: Sequence[RunCard]) -> str | None:
    """Small models and slow machines point at an answer for the full size; they do not give it."""
    reasons = [f"scale {plan.choice.scale}"] if plan.choice.scale != "1" else _shrunk(plan.full)
    if any(card.device == "cpu" for card in cards):
        reasons.append("CPU")
    return ", ".join(reasons) or None


def _shrunk(config: RunConfig) -> list[str]:
    """In what a config is smaller than its preset."""
    usual = preset(config.preset)
    sizes = {
        "width": (config.model.width, usual.model.width),
        "layers": (config.model.num_layers, usual.model.num_layers),
        "tokens a step": (config.batch.tokens, usual.batch.tokens),
    }
    return [f"{name} {size:,} instead of {full:,}" for name, (size, full) in sizes.items() if size < full]


def write_ablation(ablation: Ablation, folder: Path) -> Path:
    path = folder / ABLATION_FILE
    write_json(path, ablation.as_json())
    return path
