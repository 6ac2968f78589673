"""The same calls over NCCL, on one GPU: a group of one rank that takes itself for the first of two.

What ranks make of a step is shown over gloo in test_series.py; here NCCL, with gloo beside it, takes every call."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from paceline.data.feed import DeviceBatch
from paceline.model.masks import window_tensor
from paceline.parallel.gradients import replicate
from paceline.parallel.machine import inspect_machine
from paceline.parallel.muon_sharding import _Gather
from paceline.parallel.ranks import DeferredAny, Ranks
from paceline.settings.parallel import ParallelConfig
from paceline.train.assemble import assemble
from paceline.train.gradient_step import accumulate_gradient
from train.tiny import narrow_record

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TWO = Ranks(rank=0, world=2)


@pytest.fixture(autouse=True)
def _group_of_one() -> Iterator[None]:
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


def test_sums_and_gathers_stay_on_the_gpu_and_votes_off_it() -> None:
    values = torch.tensor([3.0], dtype=torch.float64, device="cuda")
    assert TWO.sum_(values).item() == TWO.largest_(values).item() == 3.0
    assert TWO.from_first(lambda: {"step": 3}) == {"step": 3}
    vote = DeferredAny(TWO)
    assert [vote(True), vote(False), vote(False)] == [False, True, False]
    own = torch.randn(3, 8, 4, device="cuda").bfloat16().mT
    gathered = _Gather(own, [slice(0, 3)]).stack()
    assert torch.equal(gathered, own)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("views", [False, True])
def test_a_gradient_through_nccl_is_the_gradient(compiled: bool, views: bool, tmp_path: Path) -> None:
    config = narrow_record("r18-softcap", tmp_path, steps=2)
    config = replace(config, train=replace(config.train, device="cuda", compile=compiled))
    parts = assemble(*inspect_machine(config))
    tokens = torch.randint(0, 256, (4, 128), device="cuda", dtype=torch.int32)
    batch = DeviceBatch(tokens, tokens.long())
    windows = window_tensor([128] * len(config.model.windows), torch.device("cuda"))
    plain = gradients(parts.forward, batch, windows)
    replica = replicate(parts.forward, TWO, ParallelConfig(bucket_views=views))
    for _ in range(2):  # buckets are made anew after the first
        found = gradients(replica, batch, windows)
    for name, grad in plain.items():
        torch.testing.assert_close(found[name], grad, rtol=2**-6, atol=1e-6)  # atomic adds in bf16


def gradients(model: torch.nn.Module, batch: DeviceBatch, windows: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    accumulate_gradient(model, batch, windows, torch.zeros(0, device="cuda"), micro_sequences=2)
    return {
        name.removeprefix("module."): parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
