"""`paceline doctor`."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from paceline.core.command_line import parse

HELP = """Say what this machine can run, which back ends are usable, and why not the rest.

example: paceline doctor --json"""


@dataclass(frozen=True, kw_only=True)
class DoctorArgs:
    json: bool = False
    """For programs."""


def doctor(argv: Sequence[str]) -> int:
    arguments = parse(DoctorArgs, argv, verb="doctor", description=HELP)
    from paceline.report.doctor import as_text, diagnose

    diagnosis = diagnose()
    print(json.dumps(asdict(diagnosis), indent=1) if arguments.json else as_text(diagnosis))
    return 0
