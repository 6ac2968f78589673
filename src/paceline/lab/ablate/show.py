"""An ablation on a terminal: its arms before, a table of runs while they run, and what they say."""

import sys
import time
from collections.abc import Callable, Iterable

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from paceline.core.errors import PacelineError
from paceline.lab.ablate.effects import Difference, Effect
from paceline.lab.ablate.estimate import duration, told
from paceline.lab.ablate.plan import Plan
from paceline.lab.ablate.result import Ablation
from paceline.lab.ablate.schedule import Series
from paceline.metrics.console import console_on
from paceline.metrics.records import read_metrics

REDRAW_S = 1.0
WIDTH = 150
BAR = 30
"""Columns of the longest bar of the waterfall."""


def show_plan(plan: Plan, console: Console) -> None:
    """Arms with what each changes, and those that there cannot be."""
    table = Table(box=None, pad_edge=False)
    for heading in ("arm", "starts from", "changed in it"):
        table.add_column(heading, overflow="fold")
    for arm in plan.arms:
        values = {} if arm.part is None else arm.part.before if arm.kind == "without" else arm.part.after
        table.add_row(arm.name, arm.config.preset, ", ".join(f"{field} {value}" for field, value in values.items()))
    console.print(table)
    for why in dict.fromkeys(why for _, why in plan.left_out):
        names = ", ".join(name for name, reason in plan.left_out if reason == why)
        console.print(f"left out: {names}: {why}", highlight=False, markup=False)
    rates = ", each at 0.8, 1 and 1.25 of its rates" if plan.choice.rates else ""
    runs = f"{len(plan.arms)} arms x {len(plan.seeds)} seeds{rates}: {len(plan.runs)} runs of {plan.full.steps:,} steps"
    console.print(runs, highlight=False)


class Progress:
    """A table that is drawn again on a terminal; elsewhere a line for every run that ends."""

    def __init__(self, plan: Plan, jobs: int, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self.plan, self.jobs, self.console, self.clock = plan, jobs, console, clock
        self.live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self.said: set[str] = set()
        self.drawn_at = -REDRAW_S

    def __enter__(self) -> "Progress":
        if self.live is not None:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live is not None:
            self.live.stop()

    def __call__(self, series: Series) -> None:
        if self.live is None:
            self._say(series)
        elif self.clock() - self.drawn_at >= REDRAW_S:
            self.drawn_at = self.clock()
            self.live.update(Group(self._table(series), self._left(series)), refresh=True)

    def _say(self, series: Series) -> None:
        """Each run once, when it has ended. Those that an earlier command had finished are not news."""
        ended = [n for n, one in series.outcomes.items() if one.state == "finished"] + list(series.failed)
        if not self.said and not series.running:
            self.said.update(ended)
        for name in ended:
            if name not in self.said:
                self.said.add(name)
                what = series.failed.get(name) or _cell(series, name)
                print(f"{name}: {what}; {self._left(series)}", file=self.console.file, flush=True)

    def _left(self, series: Series) -> str:
        known = duration(self.plan, series.outcomes.values())
        return told(known, len(series.to_do) + len(series.running), self.jobs)

    def _table(self, series: Series) -> Table:
        table = Table(box=None, pad_edge=False)
        table.add_column("arm")
        for seed in self.plan.seeds:
            table.add_column(f"seed {seed}", justify="right")
        for row in dict.fromkeys((run.arm, run.rate) for run in self.plan.runs):
            names = [run.name for run in self.plan.runs if (run.arm, run.rate) == row]
            at = "" if row[1] == 1.0 else f" at {row[1]:g}"
            table.add_row(row[0] + at, *(_cell(series, name) for name in names))
        return table


def _cell(series: Series, name: str) -> str:
    one = series.outcomes[name]
    if name in series.running:
        return f"step {_steps_done(series, name):,}"
    if name in series.failed:
        return "failed"
    if one.state == "finished" and one.card:
        return f"{one.card.val_loss:.4f}"
    return {"waiting": "·", "unfinished": "stopped", "refused": "not counted"}.get(one.state, one.state)


def _steps_done(series: Series, name: str) -> int:
    try:
        steps, _ = read_metrics(series.folder / name)
    except PacelineError:  # not begun, or a line that is being written
        return 0
    return steps[-1].step if steps else 0


def show_ablation(ablation: Ablation, console: Console) -> None:
    """Effects, the waterfall, the exchange rate, and what was not counted."""
    values = ablation.as_json()
    console.print(_effects_table(ablation.effects))
    for line in _waterfall_lines(values["waterfall"]):
        console.print(line, highlight=False, markup=False)
    for line in _closing_lines(ablation, values):
        console.print(line, highlight=False, markup=False)


def _effects_table(effects: Iterable[Effect]) -> Table:
    table = Table(box=None, pad_edge=False, title="with the part minus without it; 95 % interval", title_justify="left")
    for heading in ("part", "compared", "loss", "p (Holm)", "s to equal loss", "s a step", "GiB"):
        table.add_column(heading, justify="left" if heading in ("part", "compared") else "right", overflow="fold")
    for effect in effects:
        p = "–" if effect.loss.p_holm is None else f"{effect.loss.p_holm:.2g}"
        table.add_row(
            effect.technique,
            "left out" if effect.kind == "leave-one-out" else "added",
            _cell_of(effect.loss, 4),
            f"{p}{' noise' if effect.noise and effect.loss.p_holm is not None else ''}",
            _cell_of(effect.time_at_equal_loss_s, 1),
            _cell_of(effect.step_s, 3),
            _cell_of(effect.memory_gib, 3),
        )
    return table


def _cell_of(difference: Difference | None, digits: int) -> str:
    if difference is None:
        return "–"
    mean = f"{difference.mean:+.{digits}f}"
    if difference.low is None or difference.high is None:
        return mean
    return f"{mean} [{difference.low:+.{digits}f}, {difference.high:+.{digits}f}]"


def _waterfall_lines(bars: list[dict]) -> list[str]:
    if not bars:
        return []
    width = max(len(bar["label"]) for bar in bars)
    inner = [abs(bar["value"]) for bar in bars if bar["kind"] not in ("start", "end")]
    longest = max(inner, default=0.0) or 1.0
    lines = ["", "waterfall of the loss; a step is the mean of a part's effects"]
    for bar in bars:
        whole = bar["kind"] in ("start", "end")
        drawn = "" if whole else ("+" if bar["value"] > 0 else "-") * round(BAR * abs(bar["value"]) / longest)
        value = f"{bar['value']:.4f}" if whole else f"{bar['value']:+.4f}"
        lines.append(f"  {bar['label']:<{width}}  {value:>8}  {drawn}".rstrip())
    return lines


def _closing_lines(ablation: Ablation, values: dict) -> list[str]:
    lines = [""]
    if (rate := values["exchange"]) is not None:
        lines.append(f"0.01 of loss costs {rate['steps_per_loss'] / 100:.1f} steps at step {rate['at_step']:,}.")
    if len(ablation.plan.seeds) == 1:
        lines.append("One seed: differences have no interval, and none of them is told apart from noise.")
    noise = [f"{effect.technique} ({effect.kind})" for effect in ablation.effects if effect.noise]
    if noise and len(ablation.plan.seeds) > 1:
        lines.append(f"Not told apart from noise: {', '.join(noise)}.")
    if values["indicative"]:
        lines.append(f"Indicative only ({values['why_indicative']}): it settles nothing about the full size.")
    lines += [f"not counted: {name}: {why}" for name, why in ablation.not_counted]
    return lines


def console_for(json: bool) -> Console:
    """Where people read: the error stream, if a program reads the other one. A file is as wide as the tables are."""
    file = sys.stderr if json else sys.stdout
    return console_on(file, width=None if file.isatty() else WIDTH)
