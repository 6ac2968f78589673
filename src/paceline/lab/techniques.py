"""All techniques by topic, and one by its key. No torch."""

import difflib

from paceline.core.errors import UserError
from paceline.lab.table.architecture import ARCHITECTURE
from paceline.lab.table.attention import ATTENTION
from paceline.lab.table.data import DATA
from paceline.lab.table.machine import MACHINE
from paceline.lab.table.numerics import NUMERICS
from paceline.lab.table.optimizer import OPTIMIZER
from paceline.lab.table.rotary import ROTARY
from paceline.lab.table.values import VALUES
from paceline.lab.technique import Technique

TOPICS: dict[str, tuple[Technique, ...]] = {
    "Architecture": ARCHITECTURE,
    "Value path": VALUES,
    "Attention": ATTENTION,
    "Rotary positions": ROTARY,
    "Number formats": NUMERICS,
    "Optimizer and schedule": OPTIMIZER,
    "Data and batches": DATA,
    "Compiler, memory, processes": MACHINE,
}

TECHNIQUES: dict[str, Technique] = {technique.key: technique for group in TOPICS.values() for technique in group}


def technique(key: str) -> Technique:
    """The technique with this key, or an error that suggests the nearest."""
    if key not in TECHNIQUES:
        near = difflib.get_close_matches(key, TECHNIQUES, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}?" if near else "docs/techniques/index.md lists them"
        raise UserError(f"technique {key!r} does not exist; {hint}")
    return TECHNIQUES[key]
