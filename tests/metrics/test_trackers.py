"""Trackers: TensorBoard's files read back, and libraries that raise or hang at any call without costing the run."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from metrics.test_metrics_file import eval_record, step_record
from paceline.core.errors import ConfigError
from paceline.metrics import trackers as module
from paceline.metrics.metrics_file import METRICS_FILE, read_metrics
from paceline.metrics.sinks import FanOut, JsonlSink
from paceline.metrics.trackers import (
    TENSORBOARD_FOLDER,
    BackgroundTracker,
    Tracked,
    check_installed,
    scalars,
    trackers,
)
from paceline.settings.run import MetricsConfig

PROJECTS = {"wandb": MetricsConfig(wandb="speed"), "trackio": MetricsConfig(trackio="speed")}
CALLS = ("init", "log", "finish")


def tracked(folder: Path, *, start_step: int = 0) -> Tracked:
    return Tracked(
        folder=folder, name="a", started="2026-11-16T10:00:00", start_step=start_step, settings={"model": {"width": 32}}
    )


class Library(ModuleType):
    """Stands in for wandb and trackio: notes what it is asked, and raises where it is told to."""

    def __init__(self, fails_at: str = "") -> None:
        super().__init__("tracker")
        self.__spec__ = ModuleSpec("tracker", None)  # as an installed one has
        self.fails_at = fails_at
        self.asked: list[tuple[str, Any]] = []
        self.Settings = dict

    def init(self, **words: Any) -> "Library":
        self._note("init", words)
        return self

    def log(self, values: dict[str, float], step: int) -> None:
        self._note("log", (step, values))

    def finish(self) -> None:
        self._note("finish", None)

    def _note(self, call: str, words: Any) -> None:
        self.asked.append((call, words))
        if call == self.fails_at:
            raise ConnectionError("no route\nto host")


def write(folder: Path, config: MetricsConfig, *, steps: int = 3) -> list[str]:
    """A run's records into its file and its trackers; the warnings that were told."""
    warnings: list[str] = []
    sinks = FanOut([JsonlSink(folder / METRICS_FILE), *trackers(config, tracked(folder))], warn=warnings.append)
    for step in range(1, steps + 1):
        sinks.write(step_record(step))
    sinks.write(eval_record(steps))
    sinks.close()
    assert len(read_metrics(folder)[0]) == steps
    return warnings


def test_numbers_have_one_name_everywhere_and_gaps_are_left_out() -> None:
    values = scalars(replace(step_record(2, float("nan")), window_tokens=None, extra={"gradient_norm": 0.5, "x": None}))
    assert values["train/gradient_norm"] == 0.5
    assert values["train/tokens"] == 4096.0
    assert not values.keys() & {"train/loss", "train/window_tokens", "train/x"}
    assert scalars(eval_record(4)) == {"val/loss": 3.6, "val/bits_per_byte": 1.8}


# ---- TensorBoard


def events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder / TENSORBOARD_FOLDER))
    read.Reload()
    return {tag: [(event.step, event.value) for event in read.Scalars(tag)] for tag in read.Tags()["scalars"]}


def test_tensorboard_reads_back_what_was_written(tmp_path: Path) -> None:
    assert write(tmp_path, MetricsConfig(tensorboard=True)) == []
    found = events(tmp_path)
    assert found["train/loss"] == [(1, 3.5), (2, 3.5), (3, 3.5)]
    assert found["train/tokens"] == [(1, 2048.0), (2, 4096.0), (3, 6144.0)]
    assert found["val/loss"] == [(3, pytest.approx(3.6))]


def test_a_resumed_run_hides_what_was_written_after_its_checkpoint(tmp_path: Path) -> None:
    for start, loss in ((0, 3.5), (2, 3.0)):
        (sink,) = trackers(MetricsConfig(tensorboard=True), tracked(tmp_path, start_step=start))
        for step in range(start + 1, start + 4):
            sink.write(step_record(step, loss))
        sink.close()
    assert events(tmp_path)["train/loss"] == [(1, 3.5), (2, 3.5), (3, 3.0), (4, 3.0), (5, 3.0)]


# ---- Weights & Biases, trackio


@pytest.mark.parametrize("name", PROJECTS)
def test_a_library_gets_every_record_and_is_closed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    monkeypatch.setitem(sys.modules, name, library)
    assert write(tmp_path, PROJECTS[name]) == []
    assert [call for call, _ in library.asked] == ["init", "log", "log", "log", "log", "finish"]
    began, logged = library.asked[0][1], [words for call, words in library.asked if call == "log"]
    assert began["project"] == "speed"
    assert began["config"] == {"model": {"width": 32}}
    assert [step for step, _ in logged] == [1, 2, 3, 3]
    assert logged[-1][1]["val/loss"] == 3.6


@pytest.mark.parametrize("name", PROJECTS)
@pytest.mark.parametrize("fails_at", CALLS)
def test_a_library_that_raises_is_told_once_and_costs_nothing(
    name: str, fails_at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, Library(fails_at))
    assert write(tmp_path, PROJECTS[name]) == [
        f"warning: {name} failed and gets no more records (ConnectionError: no route)"
    ]


def test_the_same_run_keeps_its_id_and_another_has_its_own(tmp_path: Path) -> None:
    run = tracked(tmp_path)
    assert replace(run, start_step=7, folder=tmp_path / "moved").id == run.id
    assert replace(run, started="2026-11-16T11:00:00").id != run.id


@pytest.mark.parametrize(
    ("config", "extra"),
    [
        (MetricsConfig(tensorboard=True), "paceline[tb]"),
        (MetricsConfig(wandb="speed"), "paceline[wandb]"),
        (MetricsConfig(trackio="speed"), "paceline[trackio]"),
    ],
)
def test_a_library_that_is_missing_is_named_before_the_run(
    config: MetricsConfig, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    check_installed(MetricsConfig())
    with pytest.raises(ConfigError) as caught:
        check_installed(config)
    assert extra in str(caught.value)


def test_a_project_without_a_name_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--metrics\.wandb"):
        MetricsConfig(wandb=" ")


def test_weights_and_biases_itself_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert write(tmp_path, PROJECTS["wandb"]) == []
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


def test_trackio_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "tracked"))
    pytest.importorskip("trackio")
    assert write(tmp_path, PROJECTS["trackio"]) == []
    assert (tmp_path / "tracked" / "speed.db").exists()


# ---- hanging


class Hanging:
    """A tracker whose first call returns only when the test is over."""

    def __init__(self, until: threading.Event) -> None:
        self.until, self.reached = until, threading.Event()

    def log(self, step: int, values: dict[str, float]) -> None:
        self.reached.set()
        self.until.wait()

    def close(self) -> None: ...


@pytest.fixture
def hanging() -> Iterator[Hanging]:
    tracker = Hanging(threading.Event())
    yield tracker
    tracker.until.set()


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_tracker_that_hangs_is_dropped_and_no_step_waits_for_it(hanging: Hanging) -> None:
    clock, warnings = Clock(), list[str]()
    sinks = FanOut([BackgroundTracker("tracker", lambda: hanging, answer_s=60, clock=clock)], warn=warnings.append)
    sinks.write(step_record(1))
    assert hanging.reached.wait(10)
    clock.now = 59.0
    sinks.write(step_record(2))
    assert warnings == []
    clock.now = 61.0
    for step in (3, 4):
        sinks.write(step_record(step))
    sinks.close()
    assert warnings == ["warning: tracker failed and gets no more records (no answer for 60 s)"]


def test_a_tracker_that_hangs_at_the_end_is_left_behind(hanging: Hanging) -> None:
    warnings: list[str] = []
    sinks = FanOut([BackgroundTracker("tracker", lambda: hanging, close_s=0.01)], warn=warnings.append)
    sinks.write(step_record(1))
    sinks.close()
    assert warnings == ["warning: tracker failed and gets no more records (not done 0 s after the run)"]


def test_a_tracker_that_never_returns_does_not_keep_the_process() -> None:
    imports = "import time\nfrom paceline.metrics.trackers import BackgroundTracker"
    code = f"{imports}\nBackgroundTracker('tracker', lambda: time.sleep(3600))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_a_tracker_that_falls_too_far_behind_is_dropped(hanging: Hanging, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_WAITING", 2)
    warnings: list[str] = []
    sinks = FanOut([BackgroundTracker("tracker", lambda: hanging)], warn=warnings.append)
    for step in range(1, 8):
        sinks.write(step_record(step))
    assert len(warnings) == 1
    assert "2 records behind" in warnings[0]
