"""What the five founding descriptions ("seeds") claim, from docs/claims.toml, and what we measured about it.

The file is read strictly, so a key that is mistyped or missing is named.
"""

import functools
import re
import tomllib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from paceline.core.errors import PacelineError
from paceline.core.schema import from_dict
from paceline.recipes.records import PUBLIC
from page_text import DOCS, result_links
from result_files import Sentence, judged, read, size_of

Verdict = Literal["T", "P", "F", "N"]
VERDICTS: dict[Verdict, str] = {"T": "supported", "P": "partly", "F": "contradicted", "N": "not measurable"}
QUANTITIES = {
    "loss": ("the loss", ""),
    "step_s": ("the step time", " s"),
    "time_at_equal_loss_s": ("the time to equal loss", " s"),
    "memory_gib": ("the peak memory", " GiB"),
}
"""Name in an ablation to name in a sentence and unit."""
KINDS = {"leave-one-out": "left out", "add-one-in": "added alone"}


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
    measured: tuple[str, ...] = ()
    """Effects of ablations: file/part/kind/quantity."""
    remark: str = ""
    """What else to know of the measurement, with values of `files` as in a `Sentence`."""
    files: tuple[str, ...] = ()

    def measurement(self, page: str) -> str | None:
        """Each effect with its interval, and how far the files reach that it is from."""
        if not self.measured:
            return None
        ablations = dict.fromkeys(place.partition("/")[0] for place in self.measured)
        told = [
            *map(effect_in_words, self.measured),
            str(Sentence(said=self.remark, files=self.files)),
            f"({result_links(self.files, page)})" if self.files else "",
            *(f"{reach(file)} ({result_links([file], page)})." for file in ablations),
        ]
        return " ".join(filter(None, told))


def effect_in_words(place: str) -> str:
    file, part, kind, quantity = place.split("/")
    effects, (what, unit) = read(file)["effects"], QUANTITIES[quantity]
    effect = next((one for one in effects if (one["technique"], one["kind"]) == (part, kind)), None)
    if effect is None:
        raise PacelineError(f"docs/claims.toml: {file} has no effect of {part}, {kind}")
    values = effect[quantity]
    interval = f"95 %: {values['low']:.4g} to {values['high']:.4g}, n = {effect['n']}, {KINDS[kind]}"
    found = judged(values, what, f" for {len(effects)} effects")
    return f"`{part}` {found}: {values['mean']:.4g}{unit} ({interval})."


def reach(file: str) -> str:
    """How large the runs of an ablation were."""
    run = read(file)
    tokens = re.findall(r"--batch\.tokens (\d+)", run["command"])
    steps = f"{run['steps']} steps" + (f" of {int(tokens[-1]):,} tokens" if tokens else "")
    why = run["why_indicative"]
    return f"Indicative only: {why}, {steps}" if why else f"Measured at {size_of(run)}, {steps}"


@dataclass(frozen=True, kw_only=True)
class Seed:
    """One founding description: an account of what a record changed."""

    number: int
    record: int
    left_out: str
    """What the record changed and the description does not mention; empty if nothing of weight."""
    claim: tuple[Claim, ...]

    @property
    def preset(self) -> str:
        return next(name for name, result in PUBLIC.items() if result.record == self.record)

    @property
    def name(self) -> str:
        return f"{self.number:03d}"


@functools.cache
def seeds() -> tuple[Seed, ...]:
    """In the order of their records."""
    rows = tomllib.loads((DOCS / "claims.toml").read_text(encoding="utf-8"))["seed"]
    return tuple(from_dict(Seed, row, at=f"seed {row['number']}") for row in rows)


def claims() -> tuple[Claim, ...]:
    return tuple(claim for seed in seeds() for claim in seed.claim)


def counts(found: Iterable[Claim]) -> dict[Verdict, int]:
    """How many claims have each verdict."""
    number = Counter(claim.verdict for claim in found)
    return {verdict: number[verdict] for verdict in VERDICTS}


def about(key: str) -> list[str]:
    """A line for each claim about a technique."""
    return [
        f"Seed {seed.name}, {claim.at}: {claim.claim} *{VERDICTS[claim.verdict].capitalize()}.* {claim.fact}"
        for seed in seeds()
        for claim in seed.claim
        if key in claim.techniques
    ]
