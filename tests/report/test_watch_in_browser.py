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

pytestmark = needs_chromium

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
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # which a job in the background would ignore
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=heard)
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
    assert "of 400 steps" in page.inner_text("#part-about")
