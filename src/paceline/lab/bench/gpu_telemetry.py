"""Clock and power of the GPU while it works, from nvidia-smi."""

import contextlib
import re
import statistics
import threading
from collections.abc import Callable, Iterator, Sequence

import torch

from paceline.core.environment import answer_of

QUERY = ("--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits")
PAUSE_S = 1.5  # between two questions: an answer takes the driver some milliseconds, which the steps should not notice

GpuSample = dict[str, float | None]  # `sm_clock_mhz` and `power_w`; None where nobody answers


@contextlib.contextmanager
def sample_gpu(device: torch.device) -> Iterator[Callable[[], GpuSample]]:
    """Ask now and then while the block runs. The function given returns, after the block, the median answer."""
    answers: list[str | None] = []
    if device.type != "cuda":
        yield lambda: read_answers(answers)
        return
    command, done = ["nvidia-smi", *QUERY], threading.Event()
    if torch.cuda.device_count() > 1:  # by name, since the driver may count cards in another order than torch
        command += ["-i", f"GPU-{torch.cuda.get_device_properties(device).uuid}"]

    def ask() -> None:
        while not done.wait(PAUSE_S):
            answers.append(answer_of(*command))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    try:
        yield lambda: read_answers(answers)
    finally:
        done.set()
        thread.join()
        if not answers:  # a block too short to be asked in
            answers.append(answer_of(*command))


def read_answers(answers: Sequence[str | None]) -> GpuSample:
    """Medians over lines such as `1980, 690.12`."""
    rows = [line.split(",") for answer in answers for line in (answer or "").splitlines() if line.count(",") == 1]
    return {"sm_clock_mhz": _median([row[0] for row in rows]), "power_w": _median([row[1] for row in rows])}


def _median(fields: Sequence[str]) -> float | None:
    """Of those that are numbers, unlike [N/A]."""
    numbers = [float(field) for field in fields if re.fullmatch(r"\s*[\d.]+\s*", field)]
    return statistics.median(numbers) if numbers else None
