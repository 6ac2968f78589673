"""What a page is about: runs with their curves, in labelled groups, ablations, and what was left out. No torch."""

import itertools
import re
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from paceline.analysis.ablation import ABLATION_FILE, Ablation, read_ablations
from paceline.analysis.facts import setting, short_data
from paceline.analysis.groups import Group, changed_settings, experiment, groups_of
from paceline.analysis.runs import StoredRun, read_run
from paceline.core.errors import RunError
from paceline.report.curves import Column, Curves, MetricsFile, smoothed

WORDS = re.compile(r"([-_/]+)")  # of a name, with what stands between them
SHOWN_CHANGES = 3  # settings that a group's label may name; the table of differences has all of them


@dataclass(frozen=True, kw_only=True, eq=False)
class Run(StoredRun):
    curves: Curves

    @cached_property
    def smooth_loss(self) -> Column:
        return smoothed(self.curves.steps["train_loss"])

    @property
    def steps_done(self) -> int:
        """The card is written at validations only; a run in progress is further than that."""
        return int(max([self.card.steps_done, *self.curves.steps["step"][-1:]]))

    @property
    def is_timed(self) -> bool:
        """Whether any step was: the first ones are free."""
        free = self.config.get("train.untimed_steps")
        return not isinstance(free, int) or self.steps_done > free

    @property
    def train_s(self) -> float | None:
        return self._newest("train_s", self.card.train_s) if self.is_timed else None

    @property
    def wall_s(self) -> float | None:
        return self._newest("wall_s", self.card.wall_s)

    def _newest(self, clock: str, on_card: float | None) -> float | None:
        return max([*self.curves.steps[clock][-1:].tolist(), *([] if on_card is None else [on_card])], default=None)


@dataclass(frozen=True, kw_only=True, eq=False)
class Subject:
    runs: Sequence[Run]
    left_out: Sequence[str] = ()  # a sentence for each thing that was given and could not be read
    ablations: Sequence[Ablation] = ()
    folder: Path | None = None  # of the live page
    notes: Sequence[str] = ()  # what the live page has to say about the folder
    running: Sequence[Run] = ()  # those that the live page believes to be trained now

    @cached_property
    def groups(self) -> list[Group[Run]]:
        """Of like runs, each with a label that no other has."""
        groups = groups_of(self.runs)
        names, taken, found = differing(groups), Counter[str](), []
        own = []
        for group in groups:
            stem = _stem(group)
            begun = sum(any(run.label.startswith(stem) for run in other.members) for other in groups)
            own.append(stem if stem and begun == 1 else _label(group, names))  # no name of another group begins so
        for group, label in zip(groups, _without_shared(own), strict=True):
            taken[label] += 1
            found.append(replace(group, label=f"{label} ({taken[label]})" if taken[label] > 1 else label))
        return found

    @property
    def only(self) -> Run | None:
        return self.runs[0] if len(self.runs) == 1 else None

    @property
    def title(self) -> str:
        if self.folder is not None:
            return f"Runs in {self.folder}"
        if len(self.ablations) == 1:
            return self.ablations[0].title
        return " and ".join(run.label for run in self.runs) if len(self.runs) < 3 else f"{len(self.runs)} runs"


def load_subject(folders: Sequence[Path]) -> Subject:
    """Of folders of runs and of ablations, whose runs are taken with them."""
    is_ablation = {folder: (folder / ABLATION_FILE).is_file() for folder in folders}
    ablations, left_out = read_ablations(folder for folder in folders if is_ablation[folder])
    places: list[tuple[Path, str | None]] = []
    for folder in folders:
        if folder in ablations:
            places += [(folder / name, arm.name) for arm in ablations[folder].arms for name in arm.runs]
        elif not is_ablation[folder]:
            places.append((folder, None))
    if left_out and not places:
        raise RunError(left_out[0])
    runs, unread = load_runs(places)
    return Subject(runs=runs, left_out=[*left_out, *unread], ablations=list(ablations.values()))


def load_runs(places: Sequence[tuple[Path, str | None]]) -> tuple[list[Run], list[str]]:
    """Readable runs under labels of their own, a sentence for each other. A place: a folder, its arm of an ablation."""
    if not places:
        raise RunError("no run was given to report on; name at least one, such as runs/demo")
    runs: list[Run] = []
    left_out: list[str] = []
    for folder, arm in places:
        try:
            run = load_run(folder, MetricsFile(folder).read, arm=arm)
        except RunError as error:
            left_out.append(str(error))
            continue
        same = sum(one.label == run.label or one.label.startswith(f"{run.label} (") for one in runs)
        runs.append(replace(run, label=f"{run.label} ({same + 1})") if same else run)
    if not runs:
        raise RunError(left_out[0])
    return runs, left_out


def load_run(folder: Path, read_curves: Callable[[], Curves], *, arm: str | None = None) -> Run:
    """The run in `folder` under its card's name, or a RunError that names the damaged file."""
    one = read_run(folder)
    return Run(**{**vars(one), "label": one.card.name, "arm": arm}, curves=read_curves())


def differing(groups: Sequence[Group[Run]]) -> list[str]:
    """What sets these groups apart, by the names that `experiment` has for it."""
    every = [experiment(group.first) for group in groups]
    names = dict.fromkeys(name for one in every for name in one)
    return [name for name in names if any(one.get(name) != every[0].get(name) for one in every)]


def _stem(group: Group[Run]) -> str:
    """What the names of its runs begin with, without what counts their seeds."""
    if len(group.members) < 2 or any(run.arm is not None for run in group.members):
        return ""
    shared = _shared([run.label for run in group.members])
    while shared and (shared[-1] in ("seed", "s", "run") or not shared[-1].isalnum()):
        shared = shared[:-1]
    return "".join(shared)


def _without_shared(labels: Sequence[str]) -> list[str]:
    """Without the words that all of them begin with."""
    shared = _shared(labels) if len(labels) > 1 else []
    while shared and shared[-1].isalnum():  # cut behind a separator only
        shared = shared[:-1]
    short = [label.removeprefix("".join(shared)) for label in labels]
    return short if all(short) else list(labels)


def _shared(names: Sequence[str]) -> list[str]:
    """Words with which all of them begin."""
    words = zip(*(WORDS.split(name) for name in names), strict=False)
    return [alike[0] for alike in itertools.takewhile(lambda alike: len(set(alike)) == 1, words)]


def _label(group: Group[Run], names: Sequence[str]) -> str:
    """Its arms, the name of a run that stands alone, or the preset with what sets the group apart from the others."""
    if arms := dict.fromkeys(run.arm for run in group.members if run.arm is not None):
        return ", ".join(arms)
    if len(group.members) == 1:
        return group.first.label
    card, changed = group.first.card, changed_settings(group.first)
    own = [f"{name.split('.')[-1]} {setting(changed[name])}" for name in names if name in changed]
    more = [f"{len(own) - SHOWN_CHANGES} more"] if len(own) > SHOWN_CHANGES else []
    facts = {
        "track": card.track or "",
        "steps": f"{card.steps:,} steps",
        "data fingerprint": f"data {short_data(card)}",
        "device": str(card.device),
    }
    apart = [text for name, text in facts.items() if name in names and text]
    return ", ".join([card.preset, *own[:SHOWN_CHANGES], *more, *apart])


def mean_time(group: Group[Run], value: Callable[[Run], float | None]) -> float | None:
    """Of a time or a speed, over the runs that count; None where hardware or code differ between them."""
    known = [found for run in group.runs if (found := value(run)) is not None]
    return statistics.fmean(known) if known and group.times_comparable else None
