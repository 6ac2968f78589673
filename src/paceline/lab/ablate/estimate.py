"""How long a series of runs will take: from runs that have ended, or foretold by `lab.plan` for a GPU that it knows.

On a CPU nothing is foretold; there the first run that ends is the measure. No torch.
"""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from paceline.core.environment import environment
from paceline.core.errors import PacelineError
from paceline.core.units import human_seconds
from paceline.lab.ablate.outcomes import Outcome
from paceline.lab.ablate.plan import Plan
from paceline.lab.plan.gpus import GPUS, Cluster
from paceline.lab.plan.plan import plan as foretold
from paceline.lab.plan.work import Profile, Setting


@dataclass(frozen=True)
class Duration:
    run_s: float
    """Of one run, from launch to exit."""
    source: str

    def left(self, runs: int, jobs: int) -> float:
        """Seconds until so many runs have ended, `jobs` at a time."""
        return self.run_s * -(-runs // jobs)


def duration(plan: Plan, found: Iterable[Outcome]) -> Duration | None:
    """None: nothing is known yet."""
    measured = [one.card.wall_s for one in found if one.state == "finished" and one.card and one.card.wall_s]
    if measured:
        return Duration(
            statistics.fmean(measured), f"measured in {len(measured)} run{'s' if len(measured) > 1 else ''}"
        )
    if plan.choice.device != "cuda":
        return None
    gpu = next((key for key, kind in GPUS.items() if kind.driver_name == environment().get("gpu")), None)
    if gpu is None:
        return None
    profile: Profile = "fast" if plan.full.train.fast_paths else "reference"
    try:
        run = foretold(Setting(config=plan.full, cluster=Cluster(gpu=gpu, gpus=plan.choice.ranks), profile=profile))
    except PacelineError:  # a run that cannot be planned may still be made
        return None
    return Duration(run.wall_s, f"foretold by `paceline plan` for {gpu}")


def told(known: Duration | None, runs: int, jobs: int) -> str:
    """For people, in one line."""
    if not runs:
        return "nothing left to run"
    together = f"{runs} run{'s' if runs > 1 else ''} to make, {jobs} at a time"
    if known is None:
        return f"{together}; how long is known when the first has ended"
    left = human_seconds(known.left(runs, jobs))
    return f"{together}: about {left} ({human_seconds(known.run_s)} a run, {known.source})"
