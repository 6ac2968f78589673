"""Numbers and names as a reader wants them, for the doctor, the page and the end of a run."""

from typing import Any

from paceline.core.environment import CodeVersion
from paceline.core.units import human_bytes, human_seconds
from paceline.metrics.card import RunCard

UNKNOWN = "–"


def version_line(code: CodeVersion) -> str:
    """paceline 0.1.0, commit 0123456789, with changes."""
    parts = [f"paceline {code.version}"]
    if code.commit:
        parts.append(f"commit {code.commit[:10]}")
    return ", ".join([*parts, "with changes"] if code.dirty else parts)


def fact(name: str, value: Any) -> tuple[str, str]:
    """One entry of the environment: `memory_bytes` becomes memory, in GiB."""
    if name.endswith("_bytes") and type(value) in (int, float):
        return name.removesuffix("_bytes").replace("_", " "), human_bytes(value)
    return name.replace("_", " "), str(value)


def number(value: float | None, form: str) -> str:
    return UNKNOWN if value is None else format(value, form)


def seconds(value: float | None) -> str:
    return UNKNOWN if value is None else human_seconds(value)


def beside_bits_per_byte(card: RunCard) -> str:
    """What a reader may hold the run's bits per byte against, as a clause: gzip, and the model before training."""
    known = {"gzip -9 needs": card.gzip_bpb, "untrained": card.first_bpb}
    return ", ".join(f"{name} {value:.3f}" for name, value in known.items() if value is not None)


def setting(value: Any) -> str:
    """A value of the config: tuples in brackets, whole numbers with separators."""
    if isinstance(value, list):
        return "(" + ", ".join(map(setting, value)) + ")"
    return f"{value:,}" if type(value) is int else str(value)
