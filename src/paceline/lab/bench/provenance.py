"""What a reader needs to judge or repeat a benchmark, as plain JSON. No torch."""

import shlex
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from paceline.core.environment import code_version, environment
from paceline.core.schema import to_dict
from paceline.metrics.card import card_diff

HARDWARE = ("platform", "cpu", "cores", "memory_bytes", "gpu", "gpu_count", "gpu_memory_bytes")
"""Of the facts about the environment, those about the machine; the others are versions."""


def provenance(command: Sequence[str], *, preset: Any, config: Any) -> dict[str, Any]:
    """The part that every result has. `diff`: what was not the preset's."""
    facts, code = environment(), code_version()
    return {
        "what": shlex.join(["paceline", *command[:2]]),
        "hardware": {name: facts[name] for name in HARDWARE if name in facts},
        # the clock is taken under load by the benchmark itself
        "versions": {name: value for name, value in facts.items() if name not in (*HARDWARE, "gpu_sm_clock_mhz")},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": code.commit,
        "dirty": code.dirty,
        "command": shlex.join(["paceline", *command]),
        "diff": [to_dict(change) for change in card_diff(preset, config)],
    }
