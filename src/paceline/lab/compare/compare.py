"""What finished runs say: each group with its spread and noise floor, against a target and against the other groups.

The records' rule for a target: one-sided p < 0.01. Groups are compared by Welch's test at 0.05, corrected by Holm where
there are several comparisons. Which runs form a group and which can be compared is decided in `analysis/groups.py`.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from string import ascii_uppercase

from paceline.analysis import statistics
from paceline.analysis.facts import code
from paceline.analysis.groups import Group, groups_of, mixture, why_incomparable
from paceline.analysis.runs import LeftOut, data, read_runs
from paceline.core.errors import RunError
from paceline.lab.compare.sequential_testing import Looks, Question
from paceline.metrics.card import CARD_FILE

RECORDS_LEVEL = 0.01
PAIR_LEVEL = 0.05


@dataclass(frozen=True, kw_only=True)
class TargetAnswer:
    p: float  # one-sided, of a mean above the target
    p_looks: float  # the same after its looks (`sequential_testing.py`)
    passes: bool
    more_runs: int | None
    """Until the rule is met with probability 0.8, if mean and spread stay; None where more would not help."""
    words: str


@dataclass(frozen=True, kw_only=True)
class PairAnswer:
    first: str
    second: str
    difference: statistics.Estimate  # of the mean losses, first minus second, by Welch's test
    by_seed: statistics.Estimate | None
    """The same, paired, where the seeds are the same. Often narrower; the verdict stays with the test chosen before."""
    p_holm: float
    p_looks: float
    differs: bool
    more_runs: int | None  # in each group, until such a difference is found with probability 0.8
    words: str
    remarks: list[str]


@dataclass(frozen=True, kw_only=True)
class GroupAnswer:
    label: str
    recipe: str
    data: str  # folder of the first run's data and the beginning of their fingerprint
    hardware: list[str]
    code: list[str]
    runs: list[str]
    seeds: list[int]
    mean: float
    stdev: float | None
    noise_floor: float | None  # difference to another group of as many runs that a test at 0.05 finds in 4 of 5 cases
    target: TargetAnswer | None  # None without a target, or with one run, which shows no spread
    remarks: list[str]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    target_loss: float | None
    groups: list[GroupAnswer]
    pairs: list[PairAnswer]
    left_out: list[LeftOut]
    remarks: list[str]


def compare(
    folders: Sequence[Path], *, target: float | None = None, planned: int | None = None, remade: bool = False
) -> Comparison:
    """Compare the runs in these folders and record this look beside them. `remade`: see `why_left_out`."""
    found, damaged = read_runs(folders)
    every = groups_of(found, remade=remade)
    left_out = [*damaged, *(item for group in every for item in group.left_out)]
    counting = [group for group in every if group.runs]
    if not counting:
        reasons = "; ".join(f"{item.run}: {item.why}" for item in left_out)
        raise RunError(f"none of the runs can be compared ({reasons})")
    letters = ("".join(name) for n in itertools.count(1) for name in itertools.product(ascii_uppercase, repeat=n))
    groups = [replace(group, label=label) for group, label in zip(counting, letters, strict=False)]  # A, B, … Z, AA, …
    beside = min(run.folder.parent for group in groups for run in group.runs)
    looks = Looks(beside, planned)
    pairs, remarks = pairwise(groups, looks)
    neighbours = groups_of(read_runs(path.parent for path in sorted(beside.glob(f"*/{CARD_FILE}")))[0])
    answers = [_answer(group, target, looks, neighbours) for group in groups]
    remarks += looks.save()
    return Comparison(target_loss=target, groups=answers, pairs=pairs, left_out=left_out, remarks=remarks)


def _answer(group: Group, target: float | None, looks: Looks, neighbours: Sequence[Group]) -> GroupAnswer:
    n, stdev = len(group.runs), group.stdev
    answer, remarks = None, mixture(group)
    alike = [run for other in neighbours if other.key == group.key for run in other.runs]
    if missing := [run.label for run in alike if run.card.seed not in group.seeds]:  # choosing among results is a bias
        remarks.append(f"not given, though of this recipe and finished: {', '.join(missing)}")
    if stdev is None:
        remarks.append("one seed only: its spread is not known, so nothing can be tested")
    elif target is not None:
        question = looks.look(f"{group.key} at most {target!r}", n, looks.planned)
        remarks += question.remarks(n, looks.planned)
        answer = against(target, group, stdev, question)
    return GroupAnswer(
        label=group.label,
        recipe=group.recipe,
        data=data(group.first),
        hardware=sorted({run.hardware for run in group.runs}),
        code=sorted({code(run.card) for run in group.runs}),
        runs=[run.label for run in group.runs],
        seeds=group.seeds,
        mean=group.mean,
        stdev=stdev,
        noise_floor=None if stdev is None else statistics.smallest_effect(stdev, n, alpha=PAIR_LEVEL, test="welch"),
        target=answer,
        remarks=remarks,
    )


def against(target: float, group: Group, stdev: float, question: Question) -> TargetAnswer:
    n, gap = len(group.runs), target - group.mean
    p = statistics.mean_at_most(group.losses, target)
    p_looks = min(1.0, question.factor * p)
    passes = p_looks < RECORDS_LEVEL and not question.early
    more: int | None = 0
    if not passes:
        needed = statistics.runs_needed(stdev, max(gap, 0.0), alpha=RECORDS_LEVEL / question.factor)
        more = None if needed >= statistics.MOST_RUNS else max(1, needed - n, (question.planned or 0) - n)
    if passes:
        words = "at most the target, by the records' rule (p < 0.01)"
    elif gap <= 0:
        words = f"the mean lies {-gap:.4f} above the target; more runs would not bring it below"
    elif more is None:
        words = "too close to the target to be shown"
    else:
        words = f"not shown; about {more:,} more runs, if mean and spread stay"
    return TargetAnswer(p=p, p_looks=p_looks, passes=passes, more_runs=more, words=words)


def pairwise(groups: Sequence[Group], looks: Looks) -> tuple[list[PairAnswer], list[str]]:
    """Every two groups that can be compared, and a remark on those that cannot."""
    tested: list[tuple[Group, Group]] = []
    remarks: list[str] = []
    for a, b in itertools.combinations(groups, 2):
        why = why_incomparable(a.first, b.first)
        if why is None and (a.stdev is None or b.stdev is None):
            why = "a group of one seed shows no spread"
        if why:
            remarks.append(f"{a.label} and {b.label} are not compared: {why}")
        else:
            tested.append((a, b))
    estimates = [statistics.welch(a.losses, b.losses) for a, b in tested]
    judged = zip(tested, estimates, statistics.holm([estimate.p for estimate in estimates]), strict=True)
    level = PAIR_LEVEL / max(1, len(tested))
    return [_pair(a, b, estimate, p_holm, level, looks) for (a, b), estimate, p_holm in judged], remarks


def _pair(a: Group, b: Group, estimate: statistics.Estimate, p_holm: float, level: float, looks: Looks) -> PairAnswer:
    planned = None if looks.planned is None else 2 * looks.planned
    question = looks.look(" against ".join(sorted([a.key, b.key])), estimate.n, planned)
    p_looks = min(1.0, question.factor * p_holm)
    differs = p_looks < PAIR_LEVEL and not question.early
    more: int | None = 0
    if not differs:
        spread = math.hypot(a.stdev or 0.0, b.stdev or 0.0) / math.sqrt(2)
        needed = statistics.runs_needed(spread, estimate.mean, alpha=level / question.factor, test="welch")
        more = None if needed >= statistics.MOST_RUNS else max(1, needed - min(len(a.runs), len(b.runs)))
    by_seed = statistics.paired(a.losses, b.losses) if a.seeds == b.seeds else None
    return PairAnswer(
        first=a.label,
        second=b.label,
        difference=estimate,
        by_seed=by_seed,
        p_holm=p_holm,
        p_looks=p_looks,
        differs=differs,
        more_runs=more,
        words=_words_of_pair(a.label, b.label, estimate.mean, differs, more),
        remarks=[*question.remarks(estimate.n, planned), *_cautions(a, b, by_seed)],
    )


def _cautions(a: Group, b: Group, by_seed: statistics.Estimate | None) -> list[str]:
    one, other = a.first.card, b.first.card
    found = []
    if by_seed is not None:
        interval = f"{by_seed.low:+.4f} to {by_seed.high:+.4f}"
        found.append(f"paired by seed the interval is {interval} (p = {by_seed.p:.2g}); the verdict does not pair")
    if min(len(a.runs), len(b.runs)) == 2:
        found.append("with 2 runs in a group the interval is rough: it covers 90 to 98 % instead of 95")
    if one.steps != other.steps:
        found.append(f"{one.steps:,} steps against {other.steps:,}: the recipes differ in length, too")
    if one.device != other.device:
        found.append(f"{one.device} against {other.device}: precision may differ")
    return found


def _words_of_pair(first: str, second: str, difference: float, differs: bool, more: int | None) -> str:
    better, worse = (first, second) if difference < 0 else (second, first)
    if differs:
        return f"{better} is better than {worse} by {abs(difference):.4f}"
    if more is None:
        return "no difference seen; no number of runs would settle it"
    return f"no measurable difference; about {more:,} more runs of each would settle one of this size"
