"""`paceline ledger`: the claims the project was founded on, and which of them hold."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.core.command_line import parse
from paceline.lab.ledger import as_json, render_text, select
from paceline.lab.techniques import technique

HELP = """List what the founding descriptions claim of the records, and what the public scripts and logs say.

example: paceline ledger --seed 4 --verdict F"""


@dataclass(frozen=True, kw_only=True)
class LedgerArgs:
    seed: Literal[0, 1, 2, 3, 4] | None = None
    """Only the claims of one description."""
    verdict: Literal["T", "P", "F", "N"] | None = None
    """Only supported (T), partly true (P), contradicted (F) or not measurable (N) claims."""
    technique: str | None = None
    """Only claims about one technique, by its card's name."""
    json: bool = False
    """For programs."""


def ledger(argv: Sequence[str]) -> int:
    arguments = parse(LedgerArgs, argv, verb="ledger", description=HELP)
    if arguments.technique is not None:
        technique(arguments.technique)  # refuses one that does not exist
    claims = select(seed=arguments.seed, verdict=arguments.verdict, technique=arguments.technique)
    print(json.dumps(as_json(claims), indent=1) if arguments.json else render_text(claims))
    return 0
