"""The allocator's segments on a GPU. The CPU twin is in test_machine_switches.py."""

import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from train.tiny import losses, narrow_record, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def give_back_memory() -> None:
    """Of runs that ended, too: their objects refer to each other, and a segment that is partly in use stays."""
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def _fresh_segments() -> Iterator[None]:
    give_back_memory()
    yield
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    give_back_memory()


@pytest.mark.filterwarnings("ignore:.*_set_allocator_settings is deprecated:FutureWarning")
def test_segments_expand_only_if_asked_to_and_no_loss_changes(tmp_path: Path) -> None:
    config = narrow_record("r17-sparse-values", tmp_path / "data", steps=3)
    kinds = {}
    for asked in (False, True):
        given = replace(config.train, device="cuda", deterministic=True, expandable_segments=asked)
        done = run(replace(config, train=given), tmp_path / str(asked))
        weight = next(done.run.model.parameters()).untyped_storage().data_ptr()
        kinds[asked] = [
            segment["is_expandable"]
            for segment in torch.cuda.memory_snapshot()
            if segment["address"] <= weight < segment["address"] + segment["total_size"]
        ]
        del done
        give_back_memory()
    assert kinds == {False: [False], True: [True]}
    assert losses(tmp_path / "True") == losses(tmp_path / "False")
