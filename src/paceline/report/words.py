"""The statistics of a page in sentences: how many runs, their mean, its interval, what differs beyond chance, and what
was kept out of every mean."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from paceline.report.groups import Group
from paceline.report.runs import Run
from paceline.report.subject import Subject

NAMED = 5
"""Runs that a sentence names before it only counts them."""
CHANCE = 0.05
"""A corrected p-value below this is called a difference."""


class Estimate(Protocol):
    """A mean with its 95 % interval and the two-sided p-value of its being 0."""

    @property
    def mean(self) -> float: ...
    @property
    def low(self) -> float: ...
    @property
    def high(self) -> float: ...
    @property
    def p(self) -> float: ...


class Statistics(Protocol):
    """What a page needs of `paceline.lab.statistics`. The lab lies above this room, so the command hands it in."""

    def paired(self, with_: Sequence[float], without: Sequence[float]) -> Estimate: ...
    def welch(self, a: Sequence[float], b: Sequence[float]) -> Estimate: ...
    def holm(self, ps: Sequence[float]) -> list[float]: ...


def mean_loss(group: Group, statistics: Statistics) -> Estimate | None:
    """Of the judged runs; None of fewer than two, which tell nothing about how far seeds lie apart."""
    losses = group.losses
    return statistics.paired(losses, [0.0] * len(losses)) if len(losses) > 1 else None


def sentences(groups: Sequence[Group], statistics: Statistics) -> list[str]:
    """Means, then comparisons with the first group, then what has no interval. Of an ablation's arms nothing: the
    ablation pairs their seeds and has sentences of its own."""
    groups = [group for group in groups if group.runs[0].arm is None]
    many = [group for group in groups if len(group.losses) > 1]
    alone = [group.label for group in groups if len(group.losses) == 1]
    none = [group.label for group in groups if not group.losses]
    said = [_mean(group, mean) for group in many if (mean := mean_loss(group, statistics))]
    said += _comparisons(many, statistics)
    if alone:
        said.append(f"One seed only, so no interval and no comparison: {some(alone)}.")
    if none:
        said.append(f"No finished run with a loss yet, so no mean: {some(none)}.")
    return said


def _mean(group: Group, estimate: Estimate) -> str:
    seeds = ", ".join(map(str, sorted(set(group.seeds))))
    return (
        f"{group.label}: {len(group.losses)} runs (seeds {seeds}) end at a validation loss of {estimate.mean:.4f} on "
        f"average, 95 % interval {estimate.low:.4f} to {estimate.high:.4f}."
    )


def _comparisons(groups: Sequence[Group], statistics: Statistics) -> list[str]:
    if len(groups) < 2:
        return []
    first = groups[0]
    others = [group for group in groups[1:] if data_of(group.runs[0]) == data_of(first.runs[0])]
    estimates = [statistics.welch(group.losses, first.losses) for group in others]
    corrected = statistics.holm([estimate.p for estimate in estimates])
    apart = [group.label for group in groups[1:] if group not in others]
    said = [
        _comparison(group, first, estimate, p, len(others)) + _seed_by_seed(group, first, statistics)
        for group, estimate, p in zip(others, estimates, corrected, strict=True)
    ]
    return [*said, f"Other data than {first.label}, so not compared: {some(apart)}."] if apart else said


def _comparison(group: Group, first: Group, estimate: Estimate, p: float, comparisons: int) -> str:
    verdict = "may be chance" if not p < CHANCE else "is lower" if estimate.mean < 0 else "is higher"
    test = "Welch's test" if comparisons == 1 else f"Welch's test, corrected for {comparisons} comparisons after Holm"
    return (
        f"{group.label} minus {first.label}: {estimate.mean:+.4f}, 95 % interval {estimate.low:+.4f} to "
        f"{estimate.high:+.4f}, {p_value(p)} ({test}; n = {len(group.losses)} and {len(first.losses)}): {verdict}."
    )


def _seed_by_seed(group: Group, first: Group, statistics: Statistics) -> str:
    """Where both have the same seeds, what they say in pairs: starts and data are equal then, and their noise with
    them. Nothing else."""
    losses, others = (dict(zip(g.seeds, g.losses, strict=True)) for g in (group, first))
    if losses.keys() != others.keys():
        return ""
    estimate = statistics.paired(list(losses.values()), [others[seed] for seed in losses])
    return f" Seed by seed: 95 % interval {estimate.low:+.4f} to {estimate.high:+.4f}, {p_value(estimate.p)}."


def p_value(p: float) -> str:
    return "p < 0.0001" if p < 0.0001 else f"p = {p:.2g}"


def remarks(subject: Subject) -> list[str]:
    """What a reader of the means has to know: what is in none of them, and what they do not compare."""
    runs = subject.runs
    unfinished = [f"{r.label} ({r.steps_done:,} of {r.card.steps:,} steps)" for r in runs if not r.card.finished]
    diverged = [run.label for run in runs if run.card.finished and run.card.val_loss is None]
    repeated = [run.label for group in subject.groups for run in group.repeats]
    said = [
        f"Unfinished and in no mean: {some(unfinished)}." if unfinished and not subject.only else None,
        f"Without a last loss that is a number, and in no mean: {some(diverged)}." if diverged else None,
        f"Another run of a seed that counts already, and in no mean: {some(repeated)}." if repeated else None,
        _several("tracks", "their losses are not comparable", (run.card.track or "none" for run in runs)),
        _several("data", "their losses are not comparable", (run.card.data_fingerprint[:8] for run in runs)),
        _several("hardware", "their times are not comparable", (run.hardware for run in runs)),
        *map(_code_versions, subject.groups),
    ]
    return [sentence for sentence in said if sentence is not None]


def _several(what: str, so: str, values: Iterable[str]) -> str | None:
    different = list(dict.fromkeys(values))
    return f"Runs of different {what} ({some(different)}): {so}." if len(different) > 1 else None


def _code_versions(group: Group) -> str | None:
    found = list(dict.fromkeys((run.card.code_version.commit or "unknown")[:10] for run in group.runs))
    return f"{group.label}: runs of different code versions ({some(found)})." if len(found) > 1 else None


def data_of(run: Run) -> tuple[str | None, str]:
    """Losses are comparable where this is equal."""
    return run.card.track, run.card.data_fingerprint


def some(names: Sequence[str]) -> str:
    """a, b, c and 12 more."""
    more = len(names) - NAMED
    return ", ".join(names) if more <= 1 else f"{', '.join(names[:NAMED])} and {more} more"
