"""What the five founding descriptions claim, and what the public scripts and logs say to it. No torch.

The table is `claims.toml`: prose reads better there than between brackets. It is read strictly, so a key that is
mistyped or missing names itself.
"""

import functools
import tomllib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal

from paceline.core.schema import from_dict
from paceline.lab.technique import Measurement
from paceline.recipes.records import PUBLIC

Verdict = Literal["T", "P", "F", "N"]

VERDICTS: dict[Verdict, str] = {"T": "supported", "P": "partly", "F": "contradicted", "N": "not measurable"}


@dataclass(frozen=True, kw_only=True)
class Claim:
    at: str
    """Where in the seed it stands, by the seed's own headings."""
    claim: str
    """In our words."""
    verdict: Verdict
    fact: str
    """What scripts and logs say."""
    techniques: tuple[str, ...]
    """Keys of the techniques it is about; none where it is about a whole record or about nothing that exists."""
    measured: Measurement | None = None
    """Our own measurement, if there is one."""
    seed: int
    record: int


@dataclass(frozen=True, kw_only=True)
class Seed:
    """One founding description: an account of what a record changed."""

    number: int
    record: int
    left_out: str
    """What the record changed and the description does not mention; empty if nothing of weight."""
    claims: tuple[Claim, ...]

    @property
    def preset(self) -> str:
        return next(name for name, result in PUBLIC.items() if result.record == self.record)

    @property
    def predecessor(self) -> str:
        before = PUBLIC[self.preset].predecessor
        assert before is not None  # every seed describes a change
        return before

    @property
    def name(self) -> str:
        return f"{self.number:03d}"


@functools.cache
def seeds() -> tuple[Seed, ...]:
    """In the order of their records."""
    text = resources.files("paceline.lab").joinpath("claims.toml").read_text(encoding="utf-8")
    return tuple(_seed(row) for row in tomllib.loads(text)["seed"])


def claims() -> tuple[Claim, ...]:
    return tuple(claim for seed in seeds() for claim in seed.claims)


def counts(found: Iterable[Claim]) -> dict[Verdict, int]:
    """How many claims have each verdict."""
    number = Counter(claim.verdict for claim in found)
    return {verdict: number[verdict] for verdict in VERDICTS}


def _seed(row: dict[str, Any]) -> Seed:
    number, record = row["number"], row["record"]
    rows = [{**claim, "seed": number, "record": record} for claim in row["claim"]]
    return from_dict(
        Seed, {"number": number, "record": record, "left_out": row["left_out"], "claims": rows}, at=f"seed {number}"
    )
