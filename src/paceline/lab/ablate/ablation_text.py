"""An ablation on a terminal: its arms before, a table of runs while they run, and what they say."""

import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence

from rich.console import Console, Group
from rich.live import Live

from paceline.analysis.ablation import Ablation, Bar, Difference
from paceline.core.errors import PacelineError
from paceline.core.schema import stated
from paceline.core.units import human_seconds
from paceline.lab.ablate.arms import Plan
from paceline.lab.ablate.outcomes import Outcome
from paceline.lab.ablate.schedule import Series
from paceline.metrics.console import console_on, plain_table
from paceline.metrics.metrics_file import StepMetrics, read_metrics

REDRAW_S = 1.0
WIDTH = 150
BAR = 30  # columns of the longest bar of the waterfall


def show_plan(plan: Plan, console: Console) -> None:
    table = plain_table("arm", "starts from", "changed in it")
    for arm in plan.arms:
        values = {} if arm.part is None else arm.part.before if arm.kind == "without" else arm.part.after
        changed = ", ".join(f"{field} {stated(value)}" for field, value in values.items())
        table.add_row(arm.name, arm.config.preset, changed)
    console.print(table)
    for why in dict.fromkeys(why for _, why in plan.left_out):
        names = ", ".join(name for name, reason in plan.left_out if reason == why)
        console.print(f"left out: {names}: {why}", highlight=False)
    runs = f"{len(plan.arms)} arms x {len(plan.seeds)} seeds: {len(plan.runs)} runs of {plan.full.steps:,} steps"
    console.print(runs, highlight=False)


def seconds_left(found: Iterable[Outcome], runs: int, jobs: int) -> float | None:
    """Until so many runs have ended, `jobs` at a time; None while no run has ended."""
    ended = [one.card.wall_s for one in found if one.state == "finished" and one.card and one.card.wall_s]
    return statistics.fmean(ended) * -(-runs // jobs) if ended else None


def time_left(found: Iterable[Outcome], runs: int, jobs: int) -> str:
    if not runs:
        return "nothing left to run"
    together = f"{runs} run{'s' if runs > 1 else ''} to make, {jobs} at a time"
    if (left := seconds_left(found, runs, jobs)) is None:
        return f"{together}; how long is known when the first has ended"
    return f"{together}: about {human_seconds(left)}"


class Progress:
    """A table that is drawn again on a terminal; elsewhere a line for every run that ends."""

    def __init__(self, plan: Plan, jobs: int, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self.plan, self.jobs, self.console, self.clock = plan, jobs, console, clock
        self.live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self.said: set[str] = set()
        self.drawn_at = -REDRAW_S

    def __call__(self, series: Series) -> None:
        if self.live is None:
            self._say(series)
        elif self.clock() - self.drawn_at >= REDRAW_S:
            self.drawn_at = self.clock()
            table = plain_table("arm", *(f">seed {seed}" for seed in self.plan.seeds))
            for arm in self.plan.arms:
                table.add_row(arm.name, *(_cell(series, run.name) for run in self.plan.runs if run.arm == arm.name))
            self.live.update(Group(table, self._left(series)), refresh=True)

    def _say(self, series: Series) -> None:
        """Each run once, when it has ended. Those that an earlier command had finished are not news."""
        ended = [n for n, one in series.outcomes.items() if one.state == "finished"] + list(series.failed)
        if not self.said and not series.running:
            self.said.update(ended)
        for name in [name for name in ended if name not in self.said]:
            what = series.failed.get(name) or _cell(series, name)
            self.console.print(f"{name}: {what}; {self._left(series)}", highlight=False, soft_wrap=True)
        self.said.update(ended)

    def _left(self, series: Series) -> str:
        return time_left(series.outcomes.values(), len(series.to_do) + len(series.running), self.jobs)


def _cell(series: Series, name: str) -> str:
    one = series.outcomes[name]
    if name in series.running:
        steps = list[StepMetrics]()
        with contextlib.suppress(PacelineError):  # not begun, or a line that is being written
            steps, _ = read_metrics(series.folder / name)
        return f"step {steps[-1].step if steps else 0:,}"
    if name in series.failed:
        return "failed"
    if one.state == "finished" and one.card:
        return f"{one.card.val_loss:.4f}"
    return {"waiting": "·", "unfinished": "stopped", "refused": "not counted"}.get(one.state, one.state)


def show_ablation(ablation: Ablation, console: Console) -> None:
    headings = ("part", "compared", ">loss", ">p (Holm)", ">s to equal loss", ">s a step", ">GiB")
    table = plain_table(*headings, title="with the part minus without it; 95 % interval", title_justify="left")
    for effect in ablation.effects:
        p = effect.loss.p_holm
        noise = "–" if p is None else f"{p:.2g} noise" if effect.noise else f"{p:.2g}"
        how = "left out" if effect.kind == "leave-one-out" else "added"
        costs = ((effect.time_at_equal_loss_s, 1), (effect.step_s, 3), (effect.memory_gib, 3))
        table.add_row(effect.technique, how, _cell_of(effect.loss, 4), noise, *(_cell_of(*cost) for cost in costs))
    console.print(table)
    for line in [*_waterfall_lines(ablation.waterfall), "", *_closing_lines(ablation)]:
        console.print(line, highlight=False)


def _cell_of(difference: Difference | None, digits: int) -> str:
    if difference is None:
        return "–"
    mean = f"{difference.mean:+.{digits}f}"
    if difference.low is None or difference.high is None:
        return mean
    return f"{mean} [{difference.low:+.{digits}f}, {difference.high:+.{digits}f}]"


def _waterfall_lines(bars: Sequence[Bar]) -> list[str]:
    if not bars:
        return []
    width = max(len(bar.label) for bar in bars)
    longest = max(abs(bar.value) for bar in bars if not bar.is_whole) or 1.0
    lines = ["", "waterfall of the loss; a step is the mean of a part's effects"]
    for bar in bars:
        drawn = "" if bar.is_whole else ("+" if bar.value > 0 else "-") * round(BAR * abs(bar.value) / longest)
        lines.append(f"  {bar.label:<{width}}  {bar.shown:>8}  {drawn}".rstrip())
    return lines


def _closing_lines(ablation: Ablation) -> list[str]:
    lines = []
    if (rate := ablation.exchange) is not None:
        lines.append(f"0.01 of loss costs {rate.steps_per_loss / 100:.1f} steps at step {rate.at_step:,}.")
    for said, of_one_seed in (("One seed, so no interval and no test", True), ("No measurable effect", False)):
        noise = [effect for effect in ablation.effects if effect.noise and (effect.loss.p_holm is None) == of_one_seed]
        if noise:
            lines.append(f"{said}: {', '.join(f'{effect.technique} ({effect.kind})' for effect in noise)}.")
    if ablation.indicative:
        lines.append(f"Indicative only ({ablation.why_indicative}): it settles nothing about the full size.")
    return lines + [f"not counted: {one.run}: {one.why}" for one in ablation.not_counted]


def console_for(json: bool) -> Console:
    """Where people read: the error stream, if a program reads the other one. A file is as wide as the tables are."""
    file = sys.stderr if json else sys.stdout
    return console_on(file, width=None if file.isatty() else WIDTH)
