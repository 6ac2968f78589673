"""`paceline doctor`: what this machine is, which back ends work on it, why not the others, and what `auto` takes."""

import json
from dataclasses import asdict, dataclass

from paceline.core.environment import CodeVersion, Environment, code_version, environment
from paceline.core.probe import Choice, Verdict, back_ends, bf16_products, choose_attention, choose_device
from paceline.report.facts import fact, version_line


@dataclass(frozen=True, kw_only=True)
class DoctorArgs:
    """Say what this machine can run, and why not the rest. Example: paceline doctor --json"""

    json: bool = False
    """Print the answer for a program."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    code_version: CodeVersion
    environment: Environment
    back_ends: list[Verdict]
    chosen: dict[str, Choice]
    """What `auto` comes to: device, attention, products."""


def run_doctor(args: DoctorArgs) -> int:
    diagnosis = diagnose()
    print(json.dumps(asdict(diagnosis), indent=1) if args.json else as_text(diagnosis))
    return 0


def diagnose() -> Diagnosis:
    device = choose_device("auto")
    bf16 = bf16_products(device.name)
    chosen = {
        "device": device,
        "attention": choose_attention("auto", device.name),
        "products": Choice(name="bf16" if bf16.usable else "fp32", reason=bf16.reason),
    }
    return Diagnosis(
        code_version=code_version(),
        environment=environment(),  # after torch is loaded, so that it names the GPU in use
        back_ends=back_ends(device.name),
        chosen=chosen,
    )


def as_text(diagnosis: Diagnosis) -> str:
    machine = [fact(name, value) for name, value in diagnosis.environment.items()]
    usable = [("yes" if v.usable else "no", f"{v.name:<18} {v.reason}") for v in diagnosis.back_ends]
    chosen = [(what, f"{choice.name:<18} {choice.reason}") for what, choice in diagnosis.chosen.items()]
    sections = [(version_line(diagnosis.code_version), machine), ("Usable here", usable), ("auto would take", chosen)]
    return "\n\n".join("\n".join([title, *(f"  {key:<18} {text}" for key, text in rows)]) for title, rows in sections)
