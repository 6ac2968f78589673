"""The live page in Chromium: a new step within 2 s and without reload, runs that come and go, a trainer that knows of
nothing."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from report.browser import Opened, needs_chromium, opened, started
from report.runs_on_disk import write_run

pytestmark = [needs_chromium, pytest.mark.journey]

LAST_STEP = "Math.max(0, ...(document.getElementById('loss')?.data ?? []).flatMap((trace) => trace.x))"
TINY = [
    "train", "demo", "--steps", "400", "--model.width", "128", "--model.num-heads", "2", "--batch.tokens", "512",
    "--batch.sequence-tokens", "256", "--evaluate.every", "None", "--no-finish",
]  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that is watched."""
    return tmp_path_factory.mktemp("watched") / "runs"


@pytest.fixture(autouse=True)
def is_not_there_yet(runs: Path) -> None:
    shutil.rmtree(runs, ignore_errors=True)


@pytest.fixture(scope="module")
def watched(runs: Path) -> Iterator[Opened]:
    """`paceline watch` as a process of its own, opened in a browser once and never reloaded; Ctrl-C ends it well."""
    command = [sys.executable, "-m", "paceline.cli", "watch", str(runs), "--port", "0"]
    interruptible = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # which a job in the background would ignore
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=interruptible)
    assert server.stdout is not None
    with started() as browser:
        result = opened(browser, server.stdout.readline().split()[0])
        result.page.evaluate("window.neverReloaded = true")
        yield result
        assert result.page.evaluate("window.neverReloaded")
        assert result.complaints == []  # of any test: no console message, and no request but to this server
        server.send_signal(signal.SIGINT)
        assert server.wait(timeout=30) == 0
        result.page.get_by_text("paceline watch does not answer").wait_for()


def add_step(path: Path) -> int:
    """One more record, in two writes."""
    last = json.loads(path.read_text().splitlines()[-1])
    step = last["step"] + 1
    line = json.dumps({**last, "kind": "step", "step": step})
    with open(path, "a") as file:
        file.write(line[:30])
        file.flush()
        file.write(line[30:] + "\n")
    return int(step)


def test_a_folder_appears_and_a_new_step_is_seen_within_two_seconds(watched: Opened, runs: Path) -> None:
    page = watched.page
    page.get_by_text("No run yet").wait_for()
    metrics = write_run(runs / "first", name="first", done=150) / "metrics.jsonl"
    write_run(runs / "second", name="second", seed=1, done=120)
    page.wait_for_selector("#legend input >> nth=1")
    seen_s = []
    for _ in range(4):
        step, began = add_step(metrics), time.perf_counter()
        page.wait_for_function(f"() => {LAST_STEP} === {step}")
        seen_s.append(time.perf_counter() - began)
    assert sorted(seen_s)[-2] < 2.0, seen_s  # one may be late on a machine that does something else


def test_a_run_in_progress_is_a_line_beside_the_mean_of_those_that_are_finished(watched: Opened, runs: Path) -> None:
    for seed in (1, 2):
        write_run(runs / f"done-{seed}", name=f"done-{seed}", seed=seed, steps=60)
    metrics = write_run(runs / "going", name="going", seed=3, steps=60, done=20) / "metrics.jsonl"
    ends = "() => document.getElementById('loss')?.data.filter((t) => t.name === 'going').map((t) => t.x.at(-1))[0]"
    watched.page.wait_for_function(f"{ends} === 20")
    step = add_step(metrics)
    watched.page.wait_for_function(f"{ends} === {step}")


def test_what_the_reader_chose_stays_when_something_changes(watched: Opened, runs: Path) -> None:
    page = watched.page
    for number, name in enumerate(("red", "green")):
        write_run(runs / name, name=name, seed=number, done=60)
    green = page.get_by_role("checkbox", name="green")
    page.get_by_role("tab", name="Tokens").click()
    green.uncheck()
    page.locator("#part-configuration summary").focus()
    page.keyboard.press("Enter")
    write_run(runs / "blue", name="blue", softcap=60.0, done=90)
    page.wait_for_selector("#legend input >> nth=2")
    assert page.locator('[role="tab"][aria-selected="true"]').inner_text() == "Tokens"
    assert not green.is_checked()
    assert page.locator("#part-configuration details[open]").count() == 1
    assert page.evaluate("document.activeElement.tagName") == "SUMMARY"
    page.get_by_role("tab", name="Steps").click()


def test_a_deleted_run_goes_a_damaged_one_is_named_and_the_others_go_on(watched: Opened, runs: Path) -> None:
    page = watched.page
    for number, name in enumerate(("well", "deleted", "damaged")):
        write_run(runs / name, name=name, softcap=20.0 + number, done=30)
    page.get_by_role("checkbox", name="deleted").wait_for()
    page.get_by_role("checkbox", name="damaged").wait_for()
    shutil.rmtree(runs / "deleted")
    page.get_by_role("checkbox", name="deleted").wait_for(state="detached")
    with open(runs / "damaged" / "metrics.jsonl", "a") as file:
        file.write("{]\n")
    page.get_by_text("damaged/metrics.jsonl, line").wait_for()
    step = add_step(runs / "well" / "metrics.jsonl")
    page.wait_for_function(f"() => {LAST_STEP} === {step}")


def test_a_real_trainer_is_seen_step_by_step_and_its_death_survived(watched: Opened, runs: Path) -> None:
    page = watched.page
    command = [sys.executable, "-m", "paceline.cli", *TINY, "--out", str(runs / "real")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    trainer = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        page.get_by_text("of 400 steps").wait_for(timeout=60_000)
        page.wait_for_function(f"() => {LAST_STEP} >= 3")
        first = page.evaluate(LAST_STEP)
        page.wait_for_function(f"() => {LAST_STEP} > {first}")
    finally:
        trainer.kill()
        trainer.wait()
    write_run(runs / "next", name="next", done=30)
    page.wait_for_selector("#legend input >> nth=1")
    assert "of 400" in page.inner_text("#part-running")


def test_twenty_runs_fit_a_phone_with_those_in_progress_first(watched: Opened, runs: Path) -> None:
    page = watched.page
    for number in range(18):
        write_run(runs / f"done-{number}", name=f"done-{number}", steps=60, softcap=20.0 + number // 3, seed=number % 3)
    for name in ("going-with-a-name-of-many-words-and-then-some", "other"):
        write_run(runs / name, name=name, softcap=60.0 + len(name), done=90)
    page.set_viewport_size({"width": 390, "height": 844})
    page.get_by_text("Finished: 18 runs").wait_for()
    bars = page.get_by_role("progressbar")
    assert [bar.get_attribute("aria-valuenow") for bar in bars.all()] == ["18", "18"]  # 90 of 500 steps
    assert all(bar.bounding_box()["y"] < 844 for bar in bars.all())  # on the first screen
    assert not page.locator("#finished table >> nth=0").is_visible()
    page.evaluate("document.querySelectorAll('details').forEach((box) => { box.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    rows = page.locator("#finished table >> nth=1").locator("tbody tr")
    heights = [row.bounding_box()["height"] for row in rows.all()]
    assert len(heights) == 18
    assert max(heights) < 40  # one line each
    page.set_viewport_size({"width": 1200, "height": 900})


def test_a_box_follows_its_runs_until_the_reader_turns_it_and_stays_then(watched: Opened, runs: Path) -> None:
    page = watched.page
    for name in ("first", "other"):
        write_run(runs / name, name=name, softcap=40.0 + len(name), steps=60)
    page.locator("#finished[open] > summary", has_text="2 runs").wait_for()  # nothing is in progress
    shutil.rmtree(runs / "other")
    write_run(runs / "going", name="going", softcap=60.0, done=90)
    page.locator("#finished:not([open]) > summary", has_text="1 run").wait_for()
    page.evaluate("document.getElementById('finished').open = true")
    write_run(runs / "second", name="second", softcap=50.0, steps=60)
    page.locator("#finished > summary", has_text="2 runs").wait_for()
    assert page.evaluate("document.getElementById('finished').open")


def test_neither_first_steps_nor_one_diverged_run_rule_the_frame(watched: Opened, runs: Path) -> None:
    page = watched.page
    ends = "() => document.getElementById('loss')?._fullLayout?.yaxis.range"
    for number in range(5):
        write_run(runs / f"run-{number}", name=f"run-{number}", softcap=20.0 + number, floor=3.2 + 0.02 * number)
    page.wait_for_selector("#legend input >> nth=4")
    low, high = page.evaluate(ends)
    assert low < 3.6 < high < 5.6  # the losses go from 7.3 to 3.5, and 5.8 after 5 %
    write_run(runs / "begun", name="begun", softcap=40.0, done=3)
    write_run(runs / "diverged", name="diverged", softcap=41.0, floor=30.0)
    page.wait_for_selector("#legend input >> nth=6")
    assert page.evaluate(ends)[1] < 7
    page.get_by_label("Show the whole range").check()
    assert page.evaluate(ends)[1] > 30
    page.get_by_label("Show the whole range").uncheck()
