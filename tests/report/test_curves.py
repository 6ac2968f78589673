"""Curves of a file that grows, is torn, cut, replaced or damaged."""

import json
from pathlib import Path

import numpy as np
import pytest

from paceline.core.errors import RunError
from paceline.metrics.metrics_file import read_metrics
from paceline.report.curves import Curves, MetricsFile
from report.runs_on_disk import write_run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", steps=200)


def steps_of(curves: Curves) -> list[float]:
    return curves.steps["step"].tolist()


def test_columns_are_what_the_strict_reader_finds(folder: Path) -> None:
    curves, (steps, evals) = MetricsFile(folder).read(), read_metrics(folder)
    for name in ("step", "tokens", "train_loss", "lr_scale", "window_tokens", "train_s", "wall_s", "tokens_per_s"):
        assert curves.steps[name].tolist() == [getattr(record, name) for record in steps], name
    for name in ("step", "val_loss", "val_bpb", "wall_s"):
        assert curves.evals[name].tolist() == [getattr(record, name) for record in evals], name


def test_a_file_read_while_it_is_written_byte_by_byte_ends_as_if_read_at_once(folder: Path) -> None:
    path = folder / "metrics.jsonl"
    whole, data = MetricsFile(folder).read(), path.read_bytes()
    path.write_bytes(b"")
    growing, seen = MetricsFile(folder), []
    for end in range(0, len(data) + 997, 997):  # no divisor of a line's length: cuts lines everywhere
        path.write_bytes(data[:end])
        seen.append(len(steps_of(growing.read())))
    assert seen == sorted(seen)
    assert {name: list(column) for name, column in growing.read().steps.items() if name != "allocated_bytes"} == {
        name: list(column) for name, column in whole.steps.items() if name != "allocated_bytes"
    }


def test_a_resumed_run_that_cuts_its_file_and_writes_on_is_read_anew(folder: Path) -> None:
    path = folder / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    file = MetricsFile(folder)
    file.read()
    path.write_bytes(b"".join(lines[:100]))
    assert steps_of(file.read())[-1] < 200
    again = [line.replace(b'"wall_s": ', b'"wall_s": 9') for line in lines[100:]]  # longer than what was read before
    path.write_bytes(b"".join(lines[:100] + again))
    assert steps_of(file.read()) == list(range(1, 201))
    assert file.read().steps["wall_s"][-1] > 90


def test_a_loss_that_is_not_a_number_is_a_gap(folder: Path) -> None:
    path = folder / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    records[50]["train_loss"] = None
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert np.isnan(MetricsFile(folder).read().steps["train_loss"]).sum() == 1


@pytest.mark.parametrize(
    "line",
    ["{", "[]", "null", '{"kind": "epoch"}', '{"kind": "step", "step": 201}', "NaN", "\udcff", '{"kind": []}',
     '{"kind": "eval", "step": "9", "val_loss": 1, "tokens": 1, "train_s": 1, "wall_s": 1}', "[" * 3000],
)  # fmt: skip
def test_a_damaged_line_is_named(line: str, folder: Path) -> None:
    path = folder / "metrics.jsonl"
    number = len(path.read_bytes().splitlines()) + 1
    with open(path, "ab") as file:
        file.write(line.encode("utf-8", "surrogateescape") + b"\n")
    with pytest.raises(RunError, match=f"line {number}: not a record"):
        MetricsFile(folder).read()


def test_steps_that_go_back_are_damage(folder: Path) -> None:
    path = folder / "metrics.jsonl"
    path.write_bytes(path.read_bytes() * 2)
    with pytest.raises(RunError, match="do not follow each other"):
        MetricsFile(folder).read()
