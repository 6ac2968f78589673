"""What a page is about: runs in groups, ablations, profiled steps, and what had to be left out. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from paceline.core.errors import RunError
from paceline.report.ablation import Ablation, is_ablation, places_of, read_ablation
from paceline.report.bench import Bench
from paceline.report.groups import Group, groups_of
from paceline.report.runs import Place, Run, load_runs


@dataclass(frozen=True, kw_only=True, eq=False)
class Subject:
    runs: Sequence[Run]
    left_out: Sequence[str] = ()
    """A sentence for each thing that was given and could not be read."""
    ablations: Sequence[Ablation] = ()
    benches: Sequence[Bench] = ()
    notes: Sequence[str] = ()
    """What the live page has to say about the folder."""
    running: Sequence[Run] = ()
    """Those that the live page believes to be trained now."""

    @cached_property
    def groups(self) -> list[Group]:
        return groups_of(self.runs)

    @property
    def only(self) -> Run | None:
        """The run, if there is just one."""
        return self.runs[0] if len(self.runs) == 1 else None

    @property
    def title(self) -> str:
        if len(self.ablations) == 1:
            return f"{self.ablations[0].preset} against {self.ablations[0].against}"
        if len(self.runs) < 3:
            return " and ".join(run.label for run in self.runs)
        return f"{len(self.runs)} runs"


def load_subject(folders: Sequence[Path], benches: Sequence[Bench] = ()) -> Subject:
    """Of folders of runs and of ablations, whose runs are taken with them."""
    places: list[Place] = []
    ablations: list[Ablation] = []
    left_out: list[str] = []
    for folder in folders:
        if not is_ablation(folder):
            places.append(Place(folder))
            continue
        try:
            ablations.append(read_ablation(folder))
            places += places_of(ablations[-1], folder)
        except RunError as error:
            left_out.append(str(error))
    if left_out and not places:
        raise RunError(left_out[0])
    runs, unread = load_runs(places)
    return Subject(runs=runs, left_out=[*left_out, *unread], ablations=ablations, benches=benches)
