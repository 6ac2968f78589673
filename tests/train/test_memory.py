"""A run does not grow: what validations and records leave behind is text in files."""

import gc
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paceline.settings.schedule import StepSettings
from paceline.train.hooks import EvaluationHook
from train.tiny import run, tiny_config


def live_tensor_bytes() -> int:
    gc.collect()
    storages = {
        thing.untyped_storage().data_ptr(): thing.untyped_storage().nbytes()
        for thing in gc.get_objects()
        if type(thing) in (torch.Tensor, torch.nn.Parameter)
    }
    return sum(storages.values())


@pytest.mark.parametrize("diagnostics", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_tenth_validation_leaves_no_more_tensors_than_the_second(
    diagnostics: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: dict[int, int] = {}
    plain = EvaluationHook.before_step

    def weighed(self: EvaluationHook, settings: StepSettings) -> bool:
        made = plain(self, settings)
        if len(self._loop.evaluations) in (2, 10):
            held.setdefault(len(self._loop.evaluations), live_tensor_bytes())
        return made

    monkeypatch.setattr(EvaluationHook, "before_step", weighed)
    config = tiny_config(tmp_path / "data", steps=10)
    evaluate, metrics = replace(config.evaluate, every=1), replace(config.metrics, diagnostics=diagnostics)
    rare = replace(config.checkpoint, every=None)  # the first one takes memory for its copy of the state
    done = run(replace(config, evaluate=evaluate, metrics=metrics, checkpoint=rare), tmp_path / "run")
    assert held[10] == held[2]
    assert held[2] > sum(p.numel() * p.element_size() for p in done.run.model.parameters())
