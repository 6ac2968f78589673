"""`paceline doctor`: what this machine is, what works on it, why not the rest, and how the newest record would fit."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from paceline.commands.output import JsonArgs, answer
from paceline.core.command_line import parse
from paceline.core.environment import CodeVersion, Environment, code_version, environment
from paceline.recipes.presets import preset

if TYPE_CHECKING:
    from paceline.core.probe import Choice, Verdict
    from paceline.train.memory_trial import Outlook

HELP = """Say what this machine can run, which back ends are usable, and why not the rest.

example: paceline doctor --json"""
RECORD = "r18-softcap"  # whose memory fit is shown: the newest, in its full size


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    code_version: CodeVersion
    environment: Environment
    back_ends: "list[Verdict]"
    chosen: "dict[str, Choice]"  # what `auto` comes to: device, format of products, and each operation's back end
    fits: "dict[str, Outlook]"  # by preset, how a step would be cut to fit into memory


def doctor(argv: Sequence[str]) -> int:
    arguments = parse(JsonArgs, argv, verb="doctor", description=HELP)
    diagnosis = diagnose()
    return answer(asdict(diagnosis), lambda: print(as_text(diagnosis)), as_json=arguments.json)


def diagnose() -> Diagnosis:
    from paceline.core.probe import back_ends, choose_device, choose_products
    from paceline.parallel.machine import choose_backends
    from paceline.train.memory_trial import outlook

    device = choose_device("auto")
    products = choose_products("bf16", device.name)
    record = preset(RECORD)
    config = replace(record, train=replace(record.train, device="auto"))
    backends, _ = choose_backends(config, device.name, "bf16" if products.name == "bf16" else "fp32")
    return Diagnosis(
        code_version=code_version(),
        environment=environment(),  # after torch is loaded, so that it names the GPU in use
        back_ends=back_ends(device.name),
        chosen={"device": device, "products": products, **vars(backends)},
        fits={RECORD: outlook(config)},
    )


def as_text(diagnosis: Diagnosis) -> str:
    from paceline.analysis.facts import fact, version_line

    fits = [row for name, fit in diagnosis.fits.items() for row in ((name, fit.plan), ("", fit.memory))]
    sections = [
        (version_line(diagnosis.code_version), [fact(name, value) for name, value in diagnosis.environment.items()]),
        ("Usable here", [("yes" if v.usable else "no", f"{v.name:<18} {v.reason}") for v in diagnosis.back_ends]),
        ("auto would take", [(what, f"{found.name:<18} {found.reason}") for what, found in diagnosis.chosen.items()]),
        ("A step would fit as", fits),
    ]
    return "\n\n".join("\n".join([title, *(f"  {key:<18} {text}" for key, text in rows)]) for title, rows in sections)
