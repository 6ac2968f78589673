"""Comparison and board for a person: the same values as their JSON."""

import sys
from collections.abc import Sequence

from rich.table import Table

from paceline.analysis.facts import number
from paceline.analysis.runs import LeftOut
from paceline.core.output import one_line
from paceline.core.units import human_seconds
from paceline.lab.compare.board import Board
from paceline.lab.compare.compare import Comparison
from paceline.metrics.console import console_on, plain_table

Part = Table | Sequence[str]  # a table, or lines


def show_comparison(comparison: Comparison) -> None:
    remarks = [f"{group.label}: {remark}" for group in comparison.groups for remark in group.remarks]
    remarks += [f"{pair.first} - {pair.second}: {remark}" for pair in comparison.pairs for remark in pair.remarks]
    groups = plain_table("", ">n", ">mean loss", ">stdev", ">noise floor", "data", "recipe")
    for group in comparison.groups:
        spread = number(group.stdev, ".4f"), number(group.noise_floor, ".4f")
        groups.add_row(group.label, str(len(group.runs)), f"{group.mean:.4f}", *spread, group.data, group.recipe)
    _show(
        groups,
        _target(comparison) if comparison.target_loss is not None else (),
        _pairs(comparison) if comparison.pairs else (),
        [f"note: {remark}" for remark in (*remarks, *comparison.remarks)],
        _left_out("left out", comparison.left_out),
    )


def show_board(board: Board) -> None:
    table = plain_table(">#", ">train time", "standing", ">step", ">loss", ">stdev", ">seeds", ">p")
    lines = []
    for place, row in enumerate(board.rows, start=1):
        stdev, p = number(row.stdev, ".4f"), number(row.p, ".2g")
        losses = f"{row.step:,}", f"{row.loss:.4f}", stdev, str(len(row.seeds)), p
        table.add_row(str(place), human_seconds(row.train_s), row.standing, *losses)
        lines.append(f"{place:>{len(str(len(board.rows)))}}  {row.recipe}; {row.hardware}; {row.code}")
    _show(
        [f"track {board.track}, target {board.target:g}, data {board.rules.data_fingerprint[:10]}"],
        table,
        lines,
        [f"note: {remark}" for remark in board.remarks],
        _left_out("refused", board.refused),
    )


def _target(comparison: Comparison) -> Table:
    table = plain_table("", f">p, mean ≤ {comparison.target_loss:g}", ">after its looks", "verdict")
    for group in comparison.groups:
        if answer := group.target:
            table.add_row(group.label, f"{answer.p:.2g}", f"{answer.p_looks:.2g}", answer.words)
        else:
            table.add_row(group.label, *[number(None, "")] * 2, "one seed only; no test")
    return table


def _pairs(comparison: Comparison) -> Table:
    table = plain_table("", ">difference", ">95 % interval", ">p", ">Holm", ">after its looks", "verdict")
    for pair in comparison.pairs:
        difference = pair.difference
        interval = f"{difference.low:+.4f} to {difference.high:+.4f}"
        ps = (f"{p:.2g}" for p in (difference.p, pair.p_holm, pair.p_looks))
        table.add_row(f"{pair.first} - {pair.second}", f"{difference.mean:+.4f}", interval, *ps, pair.words)
    return table


def _left_out(title: str, items: Sequence[LeftOut]) -> Part:
    table = plain_table(title, "why")
    for item in items:
        table.add_row(item.run, item.why)
    return table if items else ()


def _show(*parts: Part) -> None:
    """Those that are not empty, a blank line between them, with names as they are: a card may say [bold]."""
    console = console_on(sys.stdout)
    for place, part in enumerate(part for part in parts if isinstance(part, Table) or part):
        if place:
            console.print()
        for line in [part] if isinstance(part, Table) else part:
            words = one_line(line) if isinstance(line, str) else line
            console.print(words, soft_wrap=isinstance(line, str), highlight=False)
