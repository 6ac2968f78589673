"""`paceline doctor`: what this machine is, which back ends work on it, why not the others, what `auto` takes, and how
the newest record would fit into its memory."""

from dataclasses import dataclass, replace

from paceline.core.environment import CodeVersion, Environment, code_version, environment
from paceline.core.probe import Choice, Verdict, back_ends, choose_attention, choose_device, choose_products
from paceline.recipes.presets import preset
from paceline.report.facts import fact, version_line
from paceline.train.config import RunConfig
from paceline.train.fit import Outlook, outlook

RECORD = "r18-softcap"
"""Whose fit is told: the newest, in its full size."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    code_version: CodeVersion
    environment: Environment
    back_ends: list[Verdict]
    chosen: dict[str, Choice]
    """What `auto` comes to: device, attention, products."""
    fits: dict[str, Outlook]
    """By preset, how a step would be cut to fit into memory."""


def diagnose() -> Diagnosis:
    device = choose_device("auto")
    chosen = {
        "device": device,
        "attention": choose_attention("auto", device.name),
        "products": choose_products("bf16", device.name),
    }
    return Diagnosis(
        code_version=code_version(),
        environment=environment(),  # after torch is loaded, so that it names the GPU in use
        back_ends=back_ends(device.name),
        chosen=chosen,
        fits={RECORD: outlook(_on_any_device(RECORD))},
    )


def _on_any_device(name: str) -> RunConfig:
    config = preset(name)
    return replace(config, train=replace(config.train, device="auto"))


def as_text(diagnosis: Diagnosis) -> str:
    machine = [fact(name, value) for name, value in diagnosis.environment.items()]
    usable = [("yes" if v.usable else "no", f"{v.name:<18} {v.reason}") for v in diagnosis.back_ends]
    chosen = [(what, f"{choice.name:<18} {choice.reason}") for what, choice in diagnosis.chosen.items()]
    fits = [row for name, told in diagnosis.fits.items() for row in ((name, told.rung), ("", told.memory))]
    sections = [
        (version_line(diagnosis.code_version), machine),
        ("Usable here", usable),
        ("auto would take", chosen),
        ("A step would fit as", fits),
    ]
    return "\n\n".join("\n".join([title, *(f"  {key:<18} {text}" for key, text in rows)]) for title, rows in sections)
