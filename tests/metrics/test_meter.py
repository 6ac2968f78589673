"""The two clocks, told by a fake one that only moves when a test says so."""

import os
import subprocess
import sys
import time

import pytest

from paceline.metrics.meter import LAUNCH_VARIABLE, Meter, MeterState, seconds_since_launch

STEP_S, EVAL_S, COMPILE_S = 2.0, 50.0, 30.0


class FakeClock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


def run(meter: Meter, clock: FakeClock, steps: range, *, evaluate_every: int = 5, tokens: int = 100) -> None:
    """The records' loop: top of the step, validation, update by so many tokens."""
    for step in steps:
        meter.begin_step(step)
        if step % evaluate_every == 0:
            with meter.paused():
                clock.advance(EVAL_S)
        clock.advance(COMPILE_S if step == 0 else STEP_S)
        meter.end_step(tokens)


def test_train_time_leaves_out_the_untimed_steps_and_validation() -> None:
    clock = FakeClock()
    meter = Meter(untimed_steps=10, already_s=7.0, clock=clock)
    clock.advance(3.0)  # building the model
    run(meter, clock, range(25))
    assert meter.train_s == 15 * STEP_S
    assert meter.wall_s == 7 + 3 + 5 * EVAL_S + COMPILE_S + 24 * STEP_S
    assert meter.startup_s == 10.0
    assert meter.first_steps_s == COMPILE_S + 9 * STEP_S
    assert meter.mean_tokens_per_s == 100 / STEP_S


def test_the_train_clock_stands_still_inside_a_pause() -> None:
    clock = FakeClock()
    meter = Meter(untimed_steps=0, clock=clock)
    run(meter, clock, range(1, 4))
    with meter.paused():
        clock.advance(EVAL_S)
        assert meter.train_s == meter.state().train_s == 3 * STEP_S
    assert meter.train_s == 3 * STEP_S


def test_nothing_after_the_last_step_counts_as_training() -> None:
    clock = FakeClock()
    meter = Meter(untimed_steps=0, clock=clock, wait=lambda: clock.advance(1.0))
    run(meter, clock, range(5), evaluate_every=100)
    meter.stop()
    train_s, rate = meter.train_s, meter.mean_tokens_per_s
    with meter.paused():
        clock.advance(6.0)  # a checkpoint
    clock.advance(7.0)  # its last bytes
    assert (meter.train_s, meter.mean_tokens_per_s) == (train_s, rate)
    assert meter.wall_s > train_s + 13.0


def test_a_pause_ends_when_validation_raises() -> None:
    clock = FakeClock()
    meter = Meter(untimed_steps=0, clock=clock)
    meter.begin_step(0)
    with pytest.raises(KeyboardInterrupt), meter.paused():
        raise KeyboardInterrupt
    clock.advance(1.0)
    assert meter.train_s == 1.0


def test_queued_work_is_waited_for_before_the_clock_starts_or_stops() -> None:
    clock = FakeClock()
    meter = Meter(untimed_steps=1, wait=lambda: clock.advance(4.0), clock=clock)
    meter.begin_step(0)
    meter.end_step(100)
    meter.begin_step(1)  # waits 4 s for step 0: free
    meter.end_step(100)
    with meter.paused():  # waits 4 s for step 1: counted
        pass  # and 4 s for the validation: not counted
    assert meter.train_s == 4.0


@pytest.mark.parametrize("stop", [3, 10, 17])
def test_a_resumed_run_reads_the_same_clocks_as_an_uninterrupted_one(stop: int) -> None:
    """Same train time if nothing is compiled anew; the second launch is in the wall time."""
    whole_clock, clock = FakeClock(), FakeClock()
    whole = Meter(untimed_steps=10, clock=whole_clock)
    run(whole, whole_clock, range(1, 25))
    first = Meter(untimed_steps=10, clock=clock)
    run(first, clock, range(1, stop))
    second = Meter(untimed_steps=10, resumed=first.state(), already_s=5.0, clock=clock)
    run(second, clock, range(stop, 25))
    assert second.train_s == whole.train_s
    assert second.wall_s == whole.wall_s + 5.0
    assert second.mean_tokens_per_s == whole.mean_tokens_per_s


def test_a_new_launch_gets_no_untimed_steps_again() -> None:
    clock = FakeClock()
    meter = Meter(untimed_steps=10, resumed=MeterState(train_s=100.0, timed_steps=50), clock=clock)
    meter.begin_step(60)
    clock.advance(COMPILE_S)
    meter.end_step(100)
    assert meter.train_s == 100.0 + COMPILE_S


def test_a_run_of_untimed_steps_only_has_a_rate_but_no_train_time() -> None:
    clock = FakeClock()
    meter = Meter(untimed_steps=10, clock=clock)
    assert meter.tokens_per_s is None
    run(meter, clock, range(1, 6))
    assert meter.train_s == 0.0
    assert meter.first_steps_s is None
    assert meter.mean_tokens_per_s == 100 / STEP_S


def test_the_current_rate_forgets_old_steps() -> None:
    clock = FakeClock()
    meter = Meter(untimed_steps=0, clock=clock)
    for seconds in [10.0] * 30 + [1.0] * 30:
        meter.begin_step(0)
        clock.advance(seconds)
        meter.end_step(100)
    assert meter.tokens_per_s == 100.0


def test_rates_count_the_tokens_of_steps_that_differ_in_size() -> None:
    """Also through a resume between the two sizes."""
    clock = FakeClock()
    first = Meter(untimed_steps=2, clock=clock)
    run(first, clock, range(1, 7), tokens=100)  # step 1 is free
    second = Meter(untimed_steps=2, resumed=first.state(), clock=clock)
    run(second, clock, range(7, 12), tokens=300)
    assert second.mean_tokens_per_s == (5 * 100 + 5 * 300) / (10 * STEP_S)
    assert second.tokens_per_s == 300 / STEP_S


def test_launch_is_when_the_process_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LAUNCH_VARIABLE, raising=False)
    code = "import time; time.sleep(0.5); from paceline.metrics.meter import seconds_since_launch as s; print(s())"
    began = time.perf_counter()
    told = float(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
    took = time.perf_counter() - began
    if told == 0.0 and not os.path.exists("/proc/self/stat"):
        pytest.skip("this system does not tell when a process started")
    assert 0.45 < told < took + 0.05


def test_a_launcher_may_say_when_it_began(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LAUNCH_VARIABLE, str(time.time() - 60))
    assert 60 <= seconds_since_launch() < 70
