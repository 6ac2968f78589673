"""Feeding changes where tensors live, not what they hold."""

from itertools import repeat

import pytest
import torch

from data.samples import BATCH, COUNTING
from paceline.data.batches import batches
from paceline.data.feed import feed
from paceline.settings.data import DataConfig


def check_equal_to_numpy(device: torch.device) -> None:
    """Each tensor is read by work queued after a long product, so a copy that is not waited for would show."""
    plain = list(batches(COUNTING, DataConfig(), BATCH, [8] * 20, seed=0))
    fed = feed(iter(plain), device)
    sums = []
    for batch, cursor in fed:
        assert cursor == plain[len(sums)][1]
        assert (batch.tokens.dtype, batch.targets.dtype) == (torch.int32, torch.int64)
        assert batch.tokens.device.type == device.type
        sums.append(torch.stack([batch.tokens.sum(), (batch.targets * batch.tokens).sum()]))
    expected = [[int(b.tokens.sum()), int((b.targets * b.tokens).sum())] for b, _ in plain]
    assert torch.stack(sums).tolist() == expected


def test_batches_reach_the_cpu_unchanged() -> None:
    check_equal_to_numpy(torch.device("cpu"))


@pytest.mark.gpu
def test_batches_reach_the_gpu_unchanged() -> None:
    check_equal_to_numpy(torch.device("cuda"))


@pytest.mark.gpu
def test_feeding_a_gpu_never_waits() -> None:
    plain = list(batches(COUNTING, DataConfig(), BATCH, [8] * 6, seed=0))
    fed = feed(iter(plain), torch.device("cuda"))
    next(fed)
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert len(list(fed)) == 5
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_stream_is_not_read_to_its_end() -> None:
    """Training data never end, so feeding must not collect them."""
    endless = batches(COUNTING, DataConfig(), BATCH, repeat(8), seed=0)
    assert next(feed(endless, torch.device("cpu")))[1].position == BATCH.tokens
