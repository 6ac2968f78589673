"""The claims as a table for a terminal and as JSON for a program."""

import dataclasses
import io
import textwrap
from collections.abc import Sequence
from typing import Any

from paceline.lab.claims import VERDICTS, Claim, Verdict, claims, counts

JSON_VERSION = 1


def select(
    *, seed: int | None = None, verdict: Verdict | None = None, technique: str | None = None
) -> tuple[Claim, ...]:
    """The claims that fit everything given; none given: all."""
    return tuple(
        claim
        for claim in claims()
        if (seed is None or claim.seed == seed)
        and (verdict is None or claim.verdict == verdict)
        and (technique is None or technique in claim.techniques)
    )


def render_text(found: Sequence[Claim], *, width: int = 120) -> str:
    """A line that counts the claims and explains the verdicts, then a table no wider than `width` columns. No colours,
    so it can be piped."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 1, 0))
    for heading, share in (("seed", None), ("claim", 5), ("verdict", None), ("what scripts and logs say", 6)):
        table.add_column(heading, ratio=share, no_wrap=share is None)
    for claim in found:
        measured = f"\nmeasured: {claim.measured.in_words(claim.measured.said)}" if claim.measured else ""
        table.add_row(f"{claim.seed:03d} (r{claim.record:02d})", claim.claim, claim.verdict, claim.fact + measured)
    text = io.StringIO()
    Console(file=text, width=width, color_system=None, markup=False, highlight=False).print(table)
    lines = [line.rstrip() for line in text.getvalue().splitlines()]
    return "\n".join([textwrap.fill(count_line(found), width), "", *lines])


def count_line(found: Sequence[Claim]) -> str:
    """134 claims: 53 supported (T), …"""
    parts = [f"{number} {VERDICTS[verdict]} ({verdict})" for verdict, number in counts(found).items()]
    return f"{len(found)} claim{'' if len(found) == 1 else 's'}: {', '.join(parts)}"


def as_json(found: Sequence[Claim]) -> dict[str, Any]:
    return {
        "version": JSON_VERSION,
        "verdicts": dict(VERDICTS),
        "counts": dict(counts(found)),
        "claims": [dataclasses.asdict(claim) for claim in found],
    }
