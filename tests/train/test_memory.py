"""A run does not grow: what validations and records leave behind is text in files."""

import gc
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paceline.metrics.records import EvalRecord
from paceline.parallel.ranks import Vote
from paceline.train import loop
from train.tiny import run, tiny_config


def live_tensor_bytes() -> int:
    gc.collect()
    storages = {
        thing.untyped_storage().data_ptr(): thing.untyped_storage().nbytes()
        for thing in gc.get_objects()
        if type(thing) in (torch.Tensor, torch.nn.Parameter)
    }
    return sum(storages.values())


@pytest.mark.parametrize("instruments", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_tenth_validation_leaves_no_more_tensors_than_the_second(
    instruments: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: dict[int, int] = {}
    plain = loop.Trainer.evaluate

    def weighed(self: loop.Trainer, step: int, agreed: Vote) -> EvalRecord | None:
        record = plain(self, step, agreed)
        if len(self.evaluations) in (2, 10):
            held[len(self.evaluations)] = live_tensor_bytes()
        return record

    monkeypatch.setattr(loop.Trainer, "evaluate", weighed)
    config = tiny_config(tmp_path / "data", steps=10)
    evaluate, metrics = replace(config.evaluate, every=1), replace(config.metrics, instruments=instruments)
    rare = replace(config.checkpoint, every=None)  # the first one takes memory for its copy of the state
    done = run(replace(config, evaluate=evaluate, metrics=metrics, checkpoint=rare), tmp_path / "run")
    assert held[10] == held[2]
    assert held[2] > sum(p.numel() * p.element_size() for p in done.parts.model.parameters())
