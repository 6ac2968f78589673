"""Running what a page shows, in this process wherever that is the same to the user: importing torch takes seconds."""

import contextlib
import io
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

import paceline
from commands.test_ablate import Inside
from journeys.smaller import smaller, smaller_config, verb_of, with_steps_that_exist
from journeys.world import World, hub_of, paragraphs
from paceline.checkpoint.run_folder import RUNS
from paceline.cli import main
from paceline.lab.ablate import local
from paceline.settings.run import RunConfig
from test_documents import ROOT
from text.test_streams import Datasets

PATIENCE_S = 60
"""For another process, or a server, to do what takes it a few seconds."""
SERVERS = ("serve", "watch")


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str = ""
    words: list[str] = field(default_factory=list)
    """The command as it was run."""


@dataclass
class Runner:
    """One page's reader: a working folder, and the names that its Python has defined so far."""

    folder: Path
    world: World
    names: dict[str, Any]
    printed: list[str] = field(default_factory=list)
    """What each command and block has said."""

    def paceline(self, shown: list[str], patch: pytest.MonkeyPatch, *, inline: bool) -> Outcome:
        words = self._prepared(shown, inline=inline)
        _stand_ins(words, patch)
        with contextlib.ExitStack() as stack:
            if words[:2] == ["data", "download"]:
                stack.enter_context(hub_of(words[2], self.world.store / "hub", patch))
            if verb_of(words) in SERVERS and "--help" not in words:
                return asked_while_it_runs(words, lambda url: urllib.request.urlopen(url, timeout=PATIENCE_S).read())
            before = set(RUNS.glob("*"))
            outcome = in_process(words)
            if "slurm" in words and outcome.code == 0:
                wait_for_job(before)
            return outcome

    def torchrun(self, shown: list[str]) -> Outcome:
        """On one host, with two ranks."""
        start = shown.index("paceline.cli") + 1
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", *shown[:start]]
        launcher[launcher.index("--nproc-per-node") + 1] = "2"
        words = self._prepared(shown[start:])
        return replace(process([*launcher, *words]), words=words)

    def tool(self, words: list[str]) -> Outcome:
        """The tool that writes pages. It only compares them."""
        assert words == ["tools/pages.py"], (
            f"python {shlex.join(words)}: no rule runs this; add one, or a row to ELSEWHERE"
        )
        return process([sys.executable, *words, "--check"], folder=ROOT)

    def python(self, block: str, patch: pytest.MonkeyPatch) -> Outcome:
        """A block in the page's namespace. One that asks a server has it."""
        self.world.furnish_python(block)
        _small_library(patch)
        if (port := re.search(r"localhost:(\d+)", block)) is None:
            with _captured() as (out, err):
                exec(compile(block, "a page", "exec"), self.names)
            return Outcome(0, out.getvalue(), err.getvalue())
        self.world.place("runs/demo")

        def ask(url: str) -> None:
            exec(compile(block.replace(port[1], url.strip("/").rpartition(":")[2]), "a page", "exec"), self.names)

        return asked_while_it_runs(["serve", "runs/demo", "--port", "0"], ask)

    def _prepared(self, shown: list[str], *, inline: bool = False) -> list[str]:
        words = smaller(shown, inline=inline)
        self.world.furnish(words)
        return with_steps_that_exist(words)


def _small_library(patch: pytest.MonkeyPatch) -> None:
    """What `smaller` does for commands."""
    pretrain, ablate = paceline.pretrain, paceline.ablate

    def small_ablation(config: RunConfig, against: RunConfig, **more: Any) -> Any:
        _stand_ins(["ablate"], patch)
        return ablate(smaller_config(config), smaller_config(against), **more | {"seeds": 1})

    patch.setattr(paceline, "pretrain", lambda config, **more: pretrain(smaller_config(config), **more))
    patch.setattr(paceline, "ablate", small_ablation)


def _stand_ins(words: list[str], patch: pytest.MonkeyPatch) -> None:
    """For what is not on this machine, and for the processes of an ablation, each of which would import torch."""
    if any(word.startswith("hf:") for word in words):
        patch.setitem(sys.modules, "datasets", Datasets([{"text": text} for text in paragraphs()]))
    if words[0] == "ablate":
        patch.setattr(local, "local_launch", lambda **_: lambda run, log, place: Inside(main(["train", *run])))
        patch.setattr("paceline.lab.ablate.schedule.POLL_S", 0.0)


def in_process(words: list[str]) -> Outcome:
    with _captured() as (out, err):
        try:
            code = main(words)
        except SystemExit as end:  # of --help
            code = int(end.code or 0)
    return Outcome(code, out.getvalue(), err.getvalue(), words)


def asked_while_it_runs(words: list[str], ask: Callable[[str], object]) -> Outcome:
    """A server: its address is asked once it has said it, then Ctrl-C is pressed."""
    over = threading.Event()
    with _captured() as (out, err), ThreadPoolExecutor(1) as beside:

        def ask_and_end() -> None:
            deadline = time.monotonic() + PATIENCE_S
            while "http://" not in out.getvalue():
                if over.wait(0.02):
                    return  # it has ended instead, and said why
                if time.monotonic() > deadline:
                    break
            try:
                ask(out.getvalue().split()[0])
            finally:
                if not over.is_set():
                    os.kill(os.getpid(), signal.SIGINT)

        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where tests run in the background
        asked = beside.submit(ask_and_end)
        code = main(words)
        over.set()
        signal.signal(signal.SIGINT, before)
        asked.result()
    return Outcome(code, out.getvalue(), err.getvalue(), words)


def wait_for_job(before: set[Path]) -> None:
    """Until a run that was not there is finished, with its report; a job goes on when the command has ended."""
    deadline = time.monotonic() + PATIENCE_S
    while not any((run / "report.html").exists() for run in set(RUNS.glob("*")) - before):
        said = "".join(path.read_text() for path in Path().rglob("*_log.err"))
        assert "exit code" not in said, said
        assert time.monotonic() < deadline, said
        time.sleep(0.1)


def process(command: list[str], *, folder: Path | None = None) -> Outcome:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=2 * PATIENCE_S, check=False
    )
    return Outcome(done.returncode, done.stdout, done.stderr, command)


@contextlib.contextmanager
def _captured() -> Iterator[tuple[io.StringIO, io.StringIO]]:
    """What is written to the two streams."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        yield out, err
