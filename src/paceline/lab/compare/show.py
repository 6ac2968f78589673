"""Comparison and board for a person: the same values as their JSON."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from paceline.core.units import human_seconds
from paceline.lab.compare.board import Board
from paceline.lab.compare.compare import Comparison
from paceline.lab.compare.groups import LeftOut
from paceline.report.facts import number


def show_comparison(comparison: Comparison) -> None:
    console = _console()
    console.print(_groups(comparison))
    if comparison.target_loss is not None:
        console.print()
        console.print(_target(comparison))
    if comparison.pairs:
        console.print()
        console.print(_pairs(comparison))
    remarks = [f"{group.label}: {remark}" for group in comparison.groups for remark in group.remarks]
    remarks += [f"{pair.first} - {pair.second}: {remark}" for pair in comparison.pairs for remark in pair.remarks]
    _remarks(console, [*remarks, *comparison.remarks])
    _left_out(console, "left out", comparison.left_out)


def show_board(board: Board) -> None:
    console = _console()
    _line(console, f"track {board.track}, target {board.target:g}, data {board.rules.data_fingerprint[:10]}")
    table = _table(
        ">#", ">train time", "standing", ">step", ">loss", ">stdev", ">seeds", ">p", "recipe", "hardware", "code"
    )
    for place, row in enumerate(board.rows, start=1):
        table.add_row(
            str(place) if row.standing != "missed" else "",
            human_seconds(row.train_s),
            row.standing,
            f"{row.step:,}",
            f"{row.loss:.4f}",
            number(row.stdev, ".4f"),
            str(len(row.seeds)),
            number(row.p, ".2g"),
            row.recipe,
            row.hardware,
            row.code,
        )
    console.print(table)
    _remarks(console, board.remarks)
    _left_out(console, "refused", board.refused)


def _groups(comparison: Comparison) -> Table:
    table = _table("", ">n", ">mean loss", ">stdev", ">noise floor", "recipe")
    for group in comparison.groups:
        spread = number(group.stdev, ".4f"), number(group.noise_floor, ".4f")
        table.add_row(group.label, str(len(group.runs)), f"{group.mean:.4f}", *spread, group.recipe)
    return table


def _target(comparison: Comparison) -> Table:
    table = _table("", f">p, mean ≤ {comparison.target_loss:g}", ">after its looks", "verdict")
    for group in comparison.groups:
        if answer := group.target:
            table.add_row(group.label, f"{answer.p:.2g}", f"{answer.p_looks:.2g}", answer.words)
        else:
            table.add_row(group.label, *[number(None, "")] * 2, "one seed only; no test")
    return table


def _pairs(comparison: Comparison) -> Table:
    table = _table("", ">difference", ">95 % interval", ">p", ">Holm", ">after its looks", "verdict")
    for pair in comparison.pairs:
        difference = pair.difference
        table.add_row(
            f"{pair.first} - {pair.second}",
            f"{difference.mean:+.4f}",
            f"{difference.low:+.4f} to {difference.high:+.4f}",
            *(f"{p:.2g}" for p in (difference.p, pair.p_holm, pair.p_looks)),
            pair.words,
        )
    return table


def _table(*headings: str) -> Table:
    """Columns by heading; one that starts with > holds numbers."""
    table = Table(box=None, pad_edge=False)
    for heading in headings:
        table.add_column(heading.removeprefix(">"), justify="right" if heading.startswith(">") else "left")
    return table


def _remarks(console: Console, remarks: Sequence[str]) -> None:
    if remarks:
        console.print()
    for remark in remarks:
        _line(console, f"note: {remark}")


def _left_out(console: Console, title: str, items: Sequence[LeftOut]) -> None:
    if not items:
        return
    console.print()
    table = _table(title, "why")
    for item in items:
        table.add_row(item.run, item.why)
    console.print(table)


def _line(console: Console, text: str) -> None:
    console.print(text, soft_wrap=True)


def _console() -> Console:
    """One that prints names as they are: a card may say [bold]."""
    return Console(markup=False, highlight=False)
