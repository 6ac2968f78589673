"""How long a run takes from launch to the end of step 10, with an empty compile cache and with a filled one.

Each start is a `paceline train` that stops there; its card says how long that took, validation left out. No torch.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from unittest.mock import patch

from paceline.core.errors import PacelineError, UserError
from paceline.metrics.card import RunCard, read_card
from paceline.metrics.meter import LAUNCH_VARIABLE

START_STEPS = 10  # the records' warm-up: compilation is over and the allocator has settled
PEAK_STEPS = 5  # enough for a gradient to be recorded
CACHE_VARIABLES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
"""Where compiled code is kept between processes, and the name of each folder here."""


def compile_cache(folder: Path) -> AbstractContextManager[object]:
    """While the block runs, this process and its children keep compiled code in `folder`."""
    return patch.dict(os.environ, {name: str(folder / part) for name, part in CACHE_VARIABLES.items()})


def measure_start(words: Sequence[str], folder: Path, *, say: Callable[[str], None]) -> dict[str, float]:
    """Seconds of `cold` and then `warm`. `words` are those of `paceline train`; the compile cache must be empty."""
    seconds = {}
    for name, cache in (("cold", "an empty"), ("warm", "a filled")):
        say(f"start with {cache} compile cache")
        card = _run(words, folder / name, steps=START_STEPS)
        if card.startup_s is None or card.first_steps_s is None:
            raise PacelineError(f"the start cannot be measured: the run ended after {card.steps_done} steps")
        seconds[name] = card.startup_s + card.first_steps_s
    return seconds


def measure_peak(words: Sequence[str], folder: Path, micro_tokens: int, *, say: Callable[[str], None]) -> float | None:
    """Peak memory in bytes of a run in such micro-batches; None where the system does not tell."""
    say(f"memory with micro-batches of {micro_tokens:,} tokens")
    return _run([*words, "--batch.micro-tokens", str(micro_tokens)], folder / "peak", steps=PEAK_STEPS).peak_bytes


def _run(words: Sequence[str], run: Path, *, steps: int) -> RunCard:
    """The card of a run that ends after so many steps."""
    ends = ["--train.stop-after", str(steps), "--train.untimed-steps", str(START_STEPS)]
    command = [sys.executable, "-m", "paceline.cli", "train", *words, *ends]
    command += ["--no-finish", "--evaluate.every", "None", "--out", str(run)]
    launched = {LAUNCH_VARIABLE: str(time.time())}
    done = subprocess.run(command, env=os.environ | launched, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "it said nothing").splitlines()[-1]
        kind = UserError if done.returncode == UserError.exit_code else PacelineError
        raise kind(f"a start cannot be measured: {last.removeprefix('paceline: ')}")
    card = read_card(run)
    shutil.rmtree(run)  # a checkpoint at full size is some gigabytes
    return card
