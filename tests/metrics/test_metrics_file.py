"""Metrics on disk: round trip, torn tails, resumed files, and sinks that fail."""

import json
import math
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from paceline.core.errors import PacelineError, RunError
from paceline.metrics.console import PLAIN_LINES, ConsoleSink
from paceline.metrics.metrics_file import (
    METRICS_FILE,
    EvalMetrics,
    Metrics,
    StepMetrics,
    from_line,
    read_metrics,
    to_line,
)
from paceline.metrics.sinks import FanOut, JsonlSink


def step_record(step: int, loss: float = 3.5) -> StepMetrics:
    return StepMetrics(
        step=step,
        train_loss=loss,
        lr_scale=1.0,
        window_tokens=128,
        tokens=step * 2048,
        train_s=step * 0.5,
        wall_s=step * 0.5 + 3,
        tokens_per_s=4096.0,
    )


def eval_record(step: int) -> EvalMetrics:
    return EvalMetrics(step=step, val_loss=3.6, val_bpb=1.8, tokens=step * 2048, train_s=step * 0.5, wall_s=9.0)


@pytest.mark.parametrize("record", [step_record(3), replace(step_record(3), extra={"norm": 0.5}), eval_record(4)])
def test_a_record_is_one_line_and_comes_back(record: Metrics) -> None:
    line = to_line(record)
    assert line.count("\n") == 1
    assert from_line(line) == record


def test_values_that_are_not_finite_are_null() -> None:
    line = to_line(replace(step_record(1, math.nan), extra={"norm": math.inf}))
    assert json.loads(line)["train_loss"] is None
    assert json.loads(line)["extra"] == {"norm": None}


def write_run(folder: Path, steps: int) -> JsonlSink:
    sink = JsonlSink(folder / METRICS_FILE)
    for step in range(1, steps + 1):
        sink.write(step_record(step))
    return sink


def test_every_line_is_on_disk_before_the_next(tmp_path: Path) -> None:
    sink = write_run(tmp_path, 3)
    sink.write(eval_record(3))
    steps, evals = read_metrics(tmp_path)  # the sink is still open: this is what a killed run leaves
    assert ([record.step for record in steps], [record.step for record in evals]) == ([1, 2, 3], [3])
    sink.close()


def test_a_resumed_run_has_no_gap_and_no_line_twice(tmp_path: Path) -> None:
    write_run(tmp_path, 10).close()
    uninterrupted = (tmp_path / METRICS_FILE).read_bytes()
    first = write_run(tmp_path, 4)
    saved = first.position()
    for step in (5, 6):  # after the checkpoint, lost by the kill
        first.write(step_record(step, loss=99.0))
    first.close()
    with open(tmp_path / METRICS_FILE, "ab") as file:
        file.write(b'{"kind": "st')
    second = JsonlSink(tmp_path / METRICS_FILE, position=saved)
    for step in range(5, 11):
        second.write(step_record(step))
    second.close()
    assert (tmp_path / METRICS_FILE).read_bytes() == uninterrupted


def test_a_file_shorter_than_the_checkpoint_says_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path, 1).close()
    with pytest.raises(RunError, match="lines are missing"):
        JsonlSink(tmp_path / METRICS_FILE, position=10_000)


def test_a_tear_at_any_byte_of_the_last_line_loses_that_line_only(tmp_path: Path) -> None:
    write_run(tmp_path, 3).close()
    path = tmp_path / METRICS_FILE
    whole = path.read_bytes()
    end_of_second = len(b"".join(whole.splitlines(keepends=True)[:2]))
    for cut in range(end_of_second, len(whole)):
        path.write_bytes(whole[:cut])
        assert [record.step for record in read_metrics(tmp_path)[0]] == [1, 2]


@pytest.mark.parametrize(
    "damaged", [b"{}", b'{"kind": "step"}', b"[1]", b"\xff\xfe", b"", b'{"kind": "step", "step": 1']
)
def test_damage_before_the_end_names_file_and_line(damaged: bytes, tmp_path: Path) -> None:
    write_run(tmp_path, 3).close()
    path = tmp_path / METRICS_FILE
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([lines[0], damaged, *lines[2:]]))
    with pytest.raises(RunError, match="line 2") as caught:
        read_metrics(tmp_path)
    assert str(path) in str(caught.value)


class Failing:
    """A tracker whose k-th call fails."""

    name = "tracker"
    required = False

    def __init__(self, fails_at: int) -> None:
        self.calls, self._fails_at = 0, fails_at

    def write(self, metrics: Metrics) -> None:
        self.calls += 1
        if self.calls == self._fails_at:
            raise ConnectionError("no route")

    def close(self) -> None:
        self.write(step_record(0))


@pytest.mark.parametrize("fails_at", [1, 3, 5])
def test_a_failing_tracker_is_dropped_with_one_line_and_the_run_goes_on(fails_at: int, tmp_path: Path) -> None:
    warnings: list[str] = []
    tracker, file = Failing(fails_at), JsonlSink(tmp_path / METRICS_FILE)
    sinks = FanOut([tracker, file], warn=warnings.append)
    for step in range(1, 5):
        sinks.write(step_record(step))
    sinks.close()
    assert len(warnings) == 1
    assert "tracker" in warnings[0]
    assert tracker.calls == fails_at
    assert len(read_metrics(tmp_path)[0]) == 4


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_a_full_disk_ends_the_run_and_names_the_file(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / METRICS_FILE)
    sink._file = open("/dev/full", "ab")  # noqa: SIM115
    with pytest.raises(PacelineError, match=METRICS_FILE):
        FanOut([sink]).write(step_record(1))


def console(*, terminal: bool) -> Console:
    return Console(file=StringIO(), force_terminal=terminal, width=100)


def output(console: Console) -> str:
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("steps", [1, 7, 20, 1000])
def test_without_a_terminal_a_run_prints_few_lines_and_its_last_step(steps: int) -> None:
    out = console(terminal=False)
    sink = ConsoleSink(steps=steps, tokens=2048 * steps, console=out)
    for step in range(1, steps + 1):
        sink.write(step_record(step))
    sink.write(eval_record(steps))
    sink.close()
    lines = output(out).splitlines()
    assert 2 <= len(lines) <= PLAIN_LINES + 2
    assert f"step {steps}/{steps}" in lines[-2]
    assert "val loss 3.6000" in lines[-1]
    assert "1.8000 bits/byte" in lines[-1]


def test_a_line_tells_rate_and_time_left() -> None:
    out = console(terminal=False)
    ConsoleSink(steps=500, tokens=500 * 2_048, console=out).write(step_record(100))
    assert "4,096 tok/s" in output(out)
    assert "3m20s left" in output(out)  # 400 steps of 2,048 tokens at 4,096 tokens/s


def test_time_left_is_that_of_the_tokens_left_where_batches_grow() -> None:
    out = console(terminal=False)
    ConsoleSink(steps=500, tokens=100 * 2_048 + 400 * 4_096, console=out).write(step_record(100))
    assert "6m40s left" in output(out)


def test_a_line_has_the_bits_per_byte_of_the_last_validation_once_there_is_one() -> None:
    out = console(terminal=False)
    sink = ConsoleSink(steps=20, tokens=2048 * 20, console=out)
    for step in (1, 2):
        sink.write(step_record(step))
        sink.write(eval_record(step))
    before, _, after, _ = output(out).splitlines()
    assert "bits/byte" not in before
    assert after.endswith("  val 1.8000 bits/byte")


def test_a_notebook_gets_plain_lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Its kernel asks for colour, and rich would write HTML there."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    sink = ConsoleSink(steps=1, tokens=2048)
    sink.write(step_record(1))
    sink.close()
    assert capsys.readouterr().out == "step 1/1  loss 3.5000  4,096 tok/s  0.0s left\n"


def test_a_terminal_gets_a_live_line_that_goes_away() -> None:
    out = console(terminal=True)
    sink = ConsoleSink(steps=4, tokens=8192, console=out)
    for step in range(1, 5):
        sink.write(step_record(step))
    sink.write(eval_record(4))
    sink.close()
    assert "val loss 3.6000" in output(out)
    assert "\x1b[" in output(out)


def test_a_loss_that_is_not_finite_is_said_to_be_so() -> None:
    out = console(terminal=False)
    ConsoleSink(steps=5, tokens=10_240, console=out).write(step_record(1, math.nan))
    assert "not finite" in output(out)
