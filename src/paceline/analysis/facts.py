"""Facts of a run as text: hardware, code version, settings, numbers. No torch."""

from collections.abc import Sequence
from typing import Any

from paceline.core.environment import CodeVersion
from paceline.core.units import human_bytes, human_seconds
from paceline.metrics.card import RunCard

UNKNOWN = "–"
NAMED = 5  # names that a sentence lists before it only counts them


def hardware(card: RunCard) -> str:
    """8 x NVIDIA H200, or 2 cores of the processor's name."""
    if card.device == "cuda":
        return f"{card.ranks} x {card.environment.get('gpu', 'unknown GPU')}"
    cores = f"{card.environment.get('cores', '?')} cores of {card.environment.get('cpu', 'unknown CPU')}"
    return cores if card.ranks == 1 else f"{card.ranks} ranks on {cores}"


def code(card: RunCard) -> str:
    """The commit, with + where the checkout had changes; the version where there is none."""
    version = card.code_version
    return f"{version.commit[:10]}{'+' if version.dirty else ''}" if version.commit else version.version


def version_line(code: CodeVersion) -> str:
    """paceline 0.1.0, commit 0123456789, with changes."""
    commit, dirty = f"commit {code.commit[:10]}" if code.commit else "", "with changes" if code.dirty else ""
    return ", ".join(filter(None, [f"paceline {code.version}", commit, dirty]))


def short_data(card: RunCard, digits: int = 8) -> str:
    """The beginnings of the fingerprints of its data."""
    return "+".join(fingerprint[:digits] for fingerprint in (card.data_fingerprint, *card.other_data))


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
    """A value of the config: tuples in brackets, whole numbers with separators, of a dict what is not None."""
    if isinstance(value, list):
        return "(" + ", ".join(map(setting, value)) + ")"
    if isinstance(value, dict):
        return ", ".join(f"{name} {setting(stated)}" for name, stated in value.items() if stated is not None)
    return f"{value:,}" if type(value) is int else str(value)


def some(names: Sequence[str]) -> str:
    """a, b, c and 12 more."""
    more = len(names) - NAMED
    return ", ".join(names) if more <= 1 else f"{', '.join(names[:NAMED])} and {more} more"
