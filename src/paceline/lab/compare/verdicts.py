"""Two questions about groups, answered: is the mean loss at most a target, and do two groups differ?

The records' rule for a target: one-sided p < 0.01. Groups are compared by Welch's test at 0.05, corrected by Holm where
there are several comparisons. An answer that is not there yet comes with the number of runs that would bring it.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.lab.compare.groups import Group
from paceline.lab.compare.looks import Book, Question
from paceline.lab.statistics import MOST_RUNS, Estimate, holm, mean_at_most, paired, runs_needed, welch
from paceline.metrics.card import RunCard
from paceline.report.facts import setting

RECORDS_LEVEL = 0.01
PAIR_LEVEL = 0.05


@dataclass(frozen=True, kw_only=True)
class TargetAnswer:
    p: float
    """One-sided, of a mean above the target."""
    p_looks: float
    """The same after its looks (`looks.py`)."""
    passes: bool
    more_runs: int | None
    """Until the rule is met with probability 0.8, if mean and spread stay; None where more would not help."""
    words: str


@dataclass(frozen=True, kw_only=True)
class PairAnswer:
    first: str
    second: str
    difference: Estimate
    """Of the mean losses, first minus second, by Welch's test."""
    by_seed: Estimate | None
    """The same, paired, where both groups have the same seeds. Often narrower; the verdict stays with the test that was
    chosen before."""
    p_holm: float
    p_looks: float
    differs: bool
    more_runs: int | None
    """In each group, until such a difference is found with probability 0.8."""
    words: str
    remarks: list[str]


def against(target: float, group: Group, stdev: float, question: Question) -> TargetAnswer:
    n, gap = len(group.runs), target - group.mean
    p = mean_at_most(group.losses, target)
    p_looks = min(1.0, question.factor * p)
    passes = p_looks < RECORDS_LEVEL and not question.early
    more: int | None = 0
    if not passes:
        needed = runs_needed(stdev, gap, alpha=RECORDS_LEVEL / question.factor) if gap > 0 else MOST_RUNS
        more = None if needed >= MOST_RUNS else max(1, needed - n, (question.planned or 0) - n)
    words = _words_of_target(passes, gap, more)
    return TargetAnswer(p=p, p_looks=p_looks, passes=passes, more_runs=more, words=words)


def _words_of_target(passes: bool, gap: float, more: int | None) -> str:
    if passes:
        return "at most the target, by the records' rule (p < 0.01)"
    if gap <= 0:
        return f"the mean lies {-gap:.4f} above the target; more runs would not bring it below"
    if more is None:
        return "too close to the target to be shown"
    return f"not shown; about {more:,} more runs, if mean and spread stay"


def pairwise(groups: Sequence[Group], labels: dict[str, str], book: Book) -> tuple[list[PairAnswer], list[str]]:
    """Every two groups that can be compared, and a remark on those that cannot."""
    tested: list[tuple[Group, Group]] = []
    remarks: list[str] = []
    for a, b in itertools.combinations(groups, 2):
        if why := _incomparable(a, b):
            remarks.append(f"{labels[a.key]} and {labels[b.key]} are not compared: {why}")
        else:
            tested.append((a, b))
    estimates = [welch(a.losses, b.losses) for a, b in tested]
    corrected = holm([estimate.p for estimate in estimates])
    level = PAIR_LEVEL / max(1, len(tested))
    answers = [
        _pair((a, b), (labels[a.key], labels[b.key]), estimate, p_holm, level, book)
        for (a, b), estimate, p_holm in zip(tested, estimates, corrected, strict=True)
    ]
    return answers, remarks


def _incomparable(a: Group, b: Group) -> str | None:
    one, other = a.first, b.first
    if one.data_fingerprint != other.data_fingerprint:
        return f"other data (fingerprints {one.data_fingerprint[:10]} and {other.data_fingerprint[:10]})"
    if one.track != other.track:
        return f"other tracks ({one.track or 'none'} and {other.track or 'none'})"
    if (parts := [_validated_on(card) for card in (one, other)])[0] != parts[1]:
        return f"validated on other tokens ({parts[0]} and {parts[1]})"
    if a.stdev is None or b.stdev is None:
        return "a group of one seed shows no spread"
    return None


def _validated_on(card: RunCard) -> str:
    stated = [setting(change.after) for change in card.diff if change.field == "evaluate.tokens"]
    return stated[0] if stated else "as many as the preset says"


def _pair(
    groups: tuple[Group, Group], labels: tuple[str, str], estimate: Estimate, p_holm: float, level: float, book: Book
) -> PairAnswer:
    a, b = groups
    planned = None if book.planned is None else 2 * book.planned
    question = book.look(" against ".join(sorted([a.key, b.key])), estimate.n, planned)
    p_looks = min(1.0, question.factor * p_holm)
    differs = p_looks < PAIR_LEVEL and not question.early
    more: int | None = 0
    if not differs:
        spread = math.hypot(a.stdev or 0.0, b.stdev or 0.0) / math.sqrt(2)
        needed = runs_needed(spread, estimate.mean, alpha=level / question.factor, test="welch")
        more = None if needed >= MOST_RUNS else max(1, needed - min(len(a.runs), len(b.runs)))
    by_seed = paired(a.losses, b.losses) if a.seeds == b.seeds else None
    return PairAnswer(
        first=labels[0],
        second=labels[1],
        difference=estimate,
        by_seed=by_seed,
        p_holm=p_holm,
        p_looks=p_looks,
        differs=differs,
        more_runs=more,
        words=_words_of_pair(labels, estimate.mean, differs, more),
        remarks=[*question.remarks(estimate.n, planned), *_cautions(a, b, by_seed)],
    )


def _cautions(a: Group, b: Group, by_seed: Estimate | None) -> list[str]:
    told = []
    if by_seed is not None:
        interval = f"{by_seed.low:+.4f} to {by_seed.high:+.4f}"
        told.append(f"paired by seed the interval is {interval} (p = {by_seed.p:.2g}); the verdict does not pair")
    if min(len(a.runs), len(b.runs)) == 2:
        told.append("with 2 runs in a group the interval is rough: it covers 90 to 98 % instead of 95")
    if a.first.steps != b.first.steps:
        told.append(f"{a.first.steps:,} steps against {b.first.steps:,}: the recipes differ in length, too")
    if a.first.device != b.first.device:
        told.append(f"{a.first.device} against {b.first.device}: precision may differ")
    return told


def _words_of_pair(labels: tuple[str, str], difference: float, differs: bool, more: int | None) -> str:
    better, worse = labels if difference < 0 else labels[::-1]
    if differs:
        return f"{better} is better than {worse} by {abs(difference):.4f}"
    if more is None:
        return "no difference seen; no number of runs would settle it"
    return f"may be noise; about {more:,} more runs of each would settle a difference of this size"
