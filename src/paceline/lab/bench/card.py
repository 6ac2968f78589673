"""Clock and power of the GPU while it works, from nvidia-smi."""

import contextlib
import statistics
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from paceline.core.environment import answer_of

QUERY = ("--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits")
PAUSE_S = 1.5
"""Between two questions: an answer takes the driver some milliseconds, which the steps should not notice."""


@dataclass(frozen=True)
class CardSample:
    """None where nobody answers."""

    sm_clock_mhz: float | None = None
    power_w: float | None = None


@contextlib.contextmanager
def sample_card(device: torch.device) -> Iterator[Callable[[], CardSample]]:
    """Ask now and then while the block runs. The function given returns, after the block, the median answer."""
    answers: list[str | None] = []
    command = _command(device)
    done = threading.Event()

    def ask() -> None:
        while not done.wait(PAUSE_S):
            answers.append(answer_of(*command))

    thread = threading.Thread(target=ask, daemon=True)
    if command:
        thread.start()
    try:
        yield lambda: read_answers(answers)
    finally:
        done.set()
        if command:
            thread.join()
            if not answers:  # a block too short to be asked in
                answers.append(answer_of(*command))


def _command(device: torch.device) -> tuple[str, ...]:
    """Empty where there is nothing to ask. Among several cards the one that torch uses is asked for by name, since the
    driver may count them in another order."""
    if device.type != "cuda":
        return ()
    if torch.cuda.device_count() == 1:
        return ("nvidia-smi", *QUERY)
    return ("nvidia-smi", *QUERY, "-i", f"GPU-{torch.cuda.get_device_properties(device).uuid}")


def read_answers(answers: list[str | None]) -> CardSample:
    """Medians over lines such as `1980, 690.12`; a field that is not a number, as [N/A], is left out."""
    rows = [line.split(",") for answer in answers for line in (answer or "").splitlines() if line.count(",") == 1]
    clocks, powers = ([float(row[column]) for row in rows if _is_number(row[column])] for column in (0, 1))
    return CardSample(
        sm_clock_mhz=statistics.median(clocks) if clocks else None,
        power_w=statistics.median(powers) if powers else None,
    )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
