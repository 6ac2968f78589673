"""These models are narrow: a second thread only waits for the first, and on a busy machine the wait is most of the time
(beside two other jobs on two cores the suite of this folder and its neighbours took 266 s, and 47 s with this)."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
