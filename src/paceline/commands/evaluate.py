"""`paceline evaluate RUN`."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from paceline.commands.output import LINE_EVERY_S, JsonArgs, answer, say
from paceline.commands.trained import TrainedRunArgs
from paceline.core.command_line import Bare, parse
from paceline.core.errors import PacelineError, naming_files
from paceline.core.schema import to_dict
from paceline.core.units import human_seconds
from paceline.evaluate.config import SuiteConfig
from paceline.metrics.card import POSITION_COLUMNS, Evaluation, add_evaluation, read_card, window_side
from paceline.metrics.console import console_on, plain_table
from paceline.metrics.metrics_file import finite
from paceline.recipes.plugins import load_plugins_for

if TYPE_CHECKING:
    from paceline.evaluate.score import Progress as Told

HELP = """Judge a trained run: validation loss, bits per byte of text files, loss by place in the document, HellaSwag,
tasks of lm-evaluation-harness. The results go onto the run's card.

example: paceline evaluate latest --text book.txt --hellaswag hellaswag_val.jsonl"""


@dataclass(frozen=True, kw_only=True)
class EvaluateArgs(JsonArgs, TrainedRunArgs):
    suite: Bare[SuiteConfig] = field(default_factory=SuiteConfig)
    device: Literal["auto", "cpu", "cuda"] = "auto"


def evaluate(argv: Sequence[str]) -> int:
    arguments = parse(EvaluateArgs, argv, verb="evaluate", description=HELP)
    from paceline.evaluate.load import load_run
    from paceline.evaluate.suite import evaluations, open_suite

    suite = open_suite(arguments.suite)
    load_plugins_for(arguments.run, arguments.plugin)
    run = load_run(arguments.run, device=arguments.device)
    read_card(run.folder.path)  # a card that cannot be read should not wait for the results
    found, not_kept = [], None
    with show_progress() as tell:
        for evaluation in evaluations(run, suite, tell):
            found.append(evaluation)
            try:
                with naming_files():
                    add_evaluation(run.folder.path, evaluation)
            except PacelineError as error:  # figures may have taken hours, and printing them needs no disk
                not_kept = error
    values = finite([to_dict(evaluation) for evaluation in found])
    code = answer(values, lambda: _show(f"{run.folder.path} at step {run.step:,}", found), as_json=arguments.json)
    if not_kept is not None:
        say(f"paceline: not all of this is on the run's card: {not_kept}")
    return code


def _show(title: str, found: Sequence[Evaluation]) -> None:
    console = console_on(sys.stdout, width=None if sys.stdout.isatty() else 120)
    console.print(title, highlight=False)
    table = plain_table("", "name", "figure", ">value", "of")
    for evaluation in found:
        counts = {unit: evaluation.of.get(unit) for unit in ("examples", "tokens", "bytes")}
        amount = ", ".join(f"{count:,} {unit}" for unit, count in counts.items() if count is not None)
        for figure, value in evaluation.figures.items():
            shown = "-" if value is None else f"{value:.4f}"
            table.add_row(evaluation.kind, evaluation.name, figure, shown, amount)
    console.print(table)
    for evaluation in found:
        if evaluation.positions:
            console.print(f"\nloss by place in the document, {evaluation.kind} {evaluation.name}", highlight=False)
            console.print(_places(evaluation))


def _places(evaluation: Evaluation) -> Table:
    table = plain_table("places", "window", ">tokens", ">loss")
    for row in evaluation.positions:
        at = dict(zip(POSITION_COLUMNS, row, strict=True))
        side = window_side(int(at["first"] or 0), evaluation.of["window_tokens"], evaluation.of.get("sequence_tokens"))
        table.add_row(f"{at['first']:,} to {at['last']:,}", side, f"{at['tokens']:,}", f"{at['loss']:.4f}")
    return table


@contextlib.contextmanager
def show_progress() -> Iterator[Callable[[str], "Told"]]:
    """A bar on a terminal, a line every ten seconds elsewhere; on standard error, so that --json stays readable."""
    if not sys.stderr.isatty():
        yield lambda what: ProgressLines(what, time.monotonic)
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console_on(sys.stderr), transient=True) as bar:

        def tell(what: str) -> "Told":
            task = bar.add_task(what, total=None)
            return lambda done, total: bar.update(task, completed=done, total=total)

        yield tell


class ProgressLines:
    def __init__(self, what: str, clock: Callable[[], float]) -> None:
        self.what, self.clock, self.began_s = what, clock, clock()
        self.last_s = self.began_s

    def __call__(self, done: int, total: int) -> None:
        now = self.clock()
        if now - self.last_s >= LINE_EVERY_S and done:
            left = human_seconds((now - self.began_s) / done * (total - done))
            say(f"{self.what}: {done:,} of {total:,}, {left} left")
            self.last_s = now
