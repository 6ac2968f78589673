"""The statistics of a page in sentences: means with intervals, which groups differ, and what is in no mean."""

from collections.abc import Iterable, Sequence

from paceline.analysis.facts import short_data, some
from paceline.analysis.groups import Group, mixture, why_incomparable
from paceline.analysis.statistics import Estimate, holm, paired, welch
from paceline.report.subject import Run, Subject

LEVEL = 0.05  # a corrected p-value below this is called a difference


def mean_loss(group: Group[Run]) -> Estimate | None:
    """None of fewer than two runs, which show no spread."""
    losses = group.losses
    return paired(losses, [0.0] * len(losses)) if len(losses) > 1 else None


def sentences(groups: Sequence[Group[Run]]) -> list[str]:
    """Means, comparisons with the first group, what has no interval; none of an ablation, which has its own."""
    groups = [group for group in groups if group.first.arm is None]
    many = [group for group in groups if len(group.runs) > 1]
    alone = [group.label for group in groups if len(group.runs) == 1]
    none = [group.label for group in groups if not group.runs]
    said = [
        f"{group.label}: {len(group.runs)} runs (seeds {', '.join(map(str, group.seeds))}) end at a validation loss of "
        f"{mean.mean:.4f} on average, 95 % interval {mean.low:.4f} to {mean.high:.4f}."
        for group in many
        if (mean := mean_loss(group))
    ]
    said += _comparisons(many)
    if alone:
        said.append(f"One seed only, so no interval and no comparison: {some(alone)}.")
    if none:
        said.append(f"No finished run with a loss yet, so no mean: {some(none)}.")
    return said


def _comparisons(groups: Sequence[Group[Run]]) -> list[str]:
    if len(groups) < 2:
        return []
    first, others = groups[0], groups[1:]
    reasons = {group.label: why_incomparable(group.first, first.first) for group in others}
    tested = [group for group in others if reasons[group.label] is None]
    estimates = [welch(group.losses, first.losses) for group in tested]
    corrected = holm([estimate.p for estimate in estimates])
    said = [
        _comparison(group, first, estimate, p, len(tested))
        for group, estimate, p in zip(tested, estimates, corrected, strict=True)
    ]
    apart = [f"{label}: {why}" for label, why in reasons.items() if why is not None]
    return [*said, f"Not compared with {first.label}: {some(apart)}."] if apart else said


def _comparison(group: Group[Run], first: Group[Run], estimate: Estimate, p: float, comparisons: int) -> str:
    verdict = "no measurable difference" if not p < LEVEL else "is lower" if estimate.mean < 0 else "is higher"
    test = "Welch's test" if comparisons == 1 else f"Welch's test, corrected for {comparisons} comparisons after Holm"
    said = (
        f"{group.label} minus {first.label}: {estimate.mean:+.4f}, 95 % interval {estimate.low:+.4f} to "
        f"{estimate.high:+.4f}, {p_value(p)} ({test}; n = {len(group.runs)} and {len(first.runs)}): {verdict}."
    )
    if group.seeds != first.seeds:
        return said
    estimate = paired(group.losses, first.losses)  # starts and data are equal then, and their noise too
    return f"{said} Seed by seed: 95 % interval {estimate.low:+.4f} to {estimate.high:+.4f}, {p_value(estimate.p)}."


def p_value(p: float) -> str:
    return "p < 0.0001" if p < 0.0001 else f"p = {p:.2g}"


def remarks(subject: Subject) -> list[str]:
    """What a reader of the means has to know: what is in none of them, and what they do not compare."""
    runs, groups = subject.runs, subject.groups
    going = {run.label for run in subject.running}  # the live page says elsewhere how far they are
    left_out = [f"{one.run} ({one.why})" for group in groups for one in group.left_out if one.run not in going]
    said = [
        f"In no mean: {some(left_out)}." if left_out else None,
        _several("tracks", "their losses are not comparable", (run.card.track or "none" for run in runs)),
        _several("data", "their losses are not comparable", (short_data(run.card) for run in runs)),
        _several("hardware", "their times are not comparable", (run.hardware for run in runs)),
        *(f"{group.label}: {remark}." for group in groups for remark in mixture(group)),
    ]
    return [sentence for sentence in said if sentence is not None]


def _several(what: str, so: str, values: Iterable[str]) -> str | None:
    different = list(dict.fromkeys(values))
    return f"Runs of different {what} ({some(different)}): {so}." if len(different) > 1 else None
