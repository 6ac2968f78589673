"""What a person sees while a run goes on: a live line on a terminal, a few plain lines anywhere else."""

import sys
from collections.abc import Iterator
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from paceline.core.output import loss_of, neutral, unchanged
from paceline.core.units import human_seconds
from paceline.metrics.metrics_file import EvalMetrics, Metrics, StepMetrics

PLAIN_LINES = 20  # step lines of a whole run where there is no terminal; a log should stay readable


class _TextConsole(Console):
    """Whatever is printed is text: no markup in it, no codes for the terminal but rich's own."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(neutral(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(neutral(segment.text), segment.style)


def console_on(file: TextIO | None, *, width: int | None = None) -> Console:
    """The one way to rich. A notebook asks for colour and is no terminal, so it would get escape codes."""
    there = unchanged(file)
    return _TextConsole(
        file=there, width=width, force_terminal=there.isatty(), force_jupyter=False, markup=False, emoji=False
    )


def plain_table(*headings: str, **options: Any) -> Table:
    """Columns by heading; one that starts with > holds numbers."""
    table = Table(box=None, pad_edge=False, **options)
    for heading in headings:
        is_number = heading.startswith(">")
        table.add_column(heading.removeprefix(">"), justify="right" if is_number else "left", overflow="fold")
    return table


class ConsoleSink:
    """A line of the newest step with the bits per byte of the last validation; validations on lines of their own."""

    name = "console"
    required = False

    def __init__(self, *, steps: int, tokens: int, start_step: int = 0, console: Console | None = None) -> None:
        """`steps` and `tokens` of the whole run."""
        self._steps, self._tokens = steps, tokens
        self._console = console or console_on(sys.stdout)
        self._last_line = start_step * PLAIN_LINES // steps if start_step else -1
        self._bpb: float | None = None
        self._progress: Progress | None = None
        self._task = TaskID(0)
        if self._console.is_terminal:
            columns = (BarColumn(bar_width=24), TextColumn("{task.description}", markup=False))
            self._progress = Progress(*columns, console=self._console, transient=True)
            self._task = self._progress.add_task("starting", total=steps, completed=start_step)
            self._progress.start()

    def write(self, metrics: Metrics) -> None:
        if isinstance(metrics, EvalMetrics):
            self._bpb = metrics.val_bpb
            self._console.print(eval_line(metrics, self._steps), markup=False, highlight=False, soft_wrap=True)
        elif self._progress is not None:
            line = self._step_line(metrics)
            self._progress.update(self._task, completed=metrics.step, description=line)
        elif (due := metrics.step * PLAIN_LINES // self._steps) > self._last_line:
            self._last_line = due
            self._console.print(self._step_line(metrics), markup=False, highlight=False, soft_wrap=True)
        if (lost := loss_of(self._console.file)) is not None:
            self.close()
            raise lost

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()

    def _step_line(self, record: StepMetrics) -> str:
        parts = [_step(record.step, self._steps), f"loss {_number(record.train_loss)}"]
        if record.tokens_per_s:
            left_s = max(0, self._tokens - record.tokens) / record.tokens_per_s  # validations come on top
            parts += [f"{record.tokens_per_s:,.0f} tok/s", f"{human_seconds(left_s)} left"]
        if self._bpb is not None:
            parts.append(f"val {_number(self._bpb)} bits/byte")
        return "  ".join(parts)


def eval_line(record: EvalMetrics, steps: int) -> str:
    parts = [_step(record.step, steps), f"val loss {_number(record.val_loss)}"]
    if record.val_bpb is not None:
        parts.append(f"{_number(record.val_bpb)} bits/byte")
    return "  ".join([*parts, f"train {human_seconds(record.train_s)}", f"wall {human_seconds(record.wall_s)}"])


def _step(step: int, steps: int) -> str:
    return f"step {step:>{len(str(steps))}}/{steps}"


def _number(value: float | None) -> str:
    return "not finite" if value is None or value != value else f"{value:.4f}"
