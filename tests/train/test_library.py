"""Runs from Python: a callback, stopping, loading, text."""

import re
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import paceline
from paceline.evaluate.config import SamplingConfig
from paceline.lab.ablate.parts import parts_of
from paceline.settings.run import RunConfig
from train.tiny import losses, run, tiny_config, weights

PAGE = Path(__file__).parents[2] / "docs" / "library.md"
GREEDY = SamplingConfig(temperature=0)


def test_from_a_config_to_text_with_a_callback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = replace(tiny_config(tmp_path / "data"), steps=6)
    told: list[paceline.StepMetrics | paceline.EvalMetrics] = []
    began = time.perf_counter()
    trained = paceline.pretrain(config, out=tmp_path / "run", on_metrics=told.append)
    took = time.perf_counter() - began
    assert "step" not in capsys.readouterr().out  # the callback says what is to be said
    assert trained.card.finished
    assert trained.card.wall_s is not None
    assert trained.card.wall_s <= took  # of this run, not of the process that it is part of
    assert [record for record in told if isinstance(record, paceline.StepMetrics)] == trained.steps
    assert [record for record in told if isinstance(record, paceline.EvalMetrics)] == trained.evaluations

    loaded = paceline.load(tmp_path / "run")
    assert loaded == trained
    text = loaded.generate("the cat", tokens=8, sampling=GREEDY)
    assert text.startswith("the cat")
    assert text == "the cat" + "".join(trained.stream("the cat", tokens=8, sampling=GREEDY))
    with pytest.raises(paceline.PacelineError, match="at least 1"):
        loaded.generate(tokens=0)


def test_a_callback_changes_no_bit_and_may_stop_the_run(tmp_path: Path) -> None:
    config = replace(tiny_config(tmp_path / "data"), steps=12)
    run(config, tmp_path / "whole")

    def enough(record: paceline.StepMetrics | paceline.EvalMetrics) -> bool:
        return record.step >= 5

    stopped = paceline.pretrain(config, out=tmp_path / "stopped", on_metrics=enough)
    done = stopped.card.steps_done
    assert not stopped.card.finished
    assert 5 <= done < 12
    assert losses(tmp_path / "stopped") == losses(tmp_path / "whole")[:done]
    assert stopped.loaded.step == done


def test_what_a_callback_raises_ends_the_run_and_is_raised(tmp_path: Path) -> None:
    def fail(_: object) -> None:
        raise ZeroDivisionError("ours")

    with pytest.raises(ZeroDivisionError, match="ours"):
        paceline.pretrain(tiny_config(tmp_path / "data"), out=tmp_path / "run", on_metrics=fail)
    assert not paceline.load(tmp_path / "run").card.finished


def test_it_trains_on_a_thread_that_receives_no_signals(tmp_path: Path) -> None:
    config = replace(tiny_config(tmp_path / "data"), steps=2)
    worker = threading.Thread(target=paceline.pretrain, args=(config,), kwargs={"out": tmp_path / "run"})
    worker.start()
    worker.join()
    assert paceline.load(tmp_path / "run").card.finished


def test_a_run_in_progress_is_left_alone(tmp_path: Path) -> None:
    config, out, refused = replace(tiny_config(tmp_path / "data"), steps=2), tmp_path / "run", []

    def intrude(_: object) -> None:
        with pytest.raises(paceline.PacelineError, match="another process trains this run"):
            paceline.pretrain(config, out=out)
        refused.append(True)

    assert paceline.pretrain(config, out=out, on_metrics=intrude).card.finished
    assert refused


def test_a_folder_that_is_taken_and_a_run_that_is_not_there_are_errors_of_ours(tmp_path: Path) -> None:
    config = replace(tiny_config(tmp_path / "data"), steps=1)
    paceline.pretrain(config, out=tmp_path / "run")
    with pytest.raises(paceline.PacelineError, match="holds a run already"):
        paceline.pretrain(config, out=tmp_path / "run")
    with pytest.raises(paceline.PacelineError, match="no such run"):
        paceline.load(tmp_path / "elsewhere")


def test_the_code_on_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a small model, and with four steps where the page has two hundred. Of the ablation only its parts are looked
    at: its runs are processes, which know nothing of the small model."""
    taken_apart: list[list[str]] = []

    def ablate(config: RunConfig, against: RunConfig, **_: object) -> SimpleNamespace:
        taken_apart.append([part.key for part in parts_of(against, config)])
        return SimpleNamespace(effects=[])

    monkeypatch.setattr("paceline.library.ablate", ablate)
    config = tiny_config(tmp_path / "data")
    monkeypatch.setattr("paceline.library.preset", lambda _: config)
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 4
    names: dict[str, object] = {}
    for block in blocks:
        exec(block.replace("200", "4").replace("311, 50", "4, 2"), names)
    assert sorted(names["norms"]) == [0, 2]  # type: ignore[call-overload]
    assert len(paceline.load("no-cap").steps) == 4
    *before, last = paceline.load("demo").evaluations
    assert all(record.val_loss is not None and record.val_loss >= 4.0 for record in before)
    assert last.val_loss is not None
    assert taken_apart == [["softcap", "muon"]]


def test_a_look_between_steps_sees_the_weights_and_slots_of_that_step_and_changes_no_bit(tmp_path: Path) -> None:
    config = replace(tiny_config(tmp_path / "data"), steps=6)
    run(config, tmp_path / "unseen")
    seen: dict[int, tuple[torch.Tensor, float, int]] = {}

    def look(view: Any) -> bool:
        assert not torch.is_grad_enabled()
        state = view.optimizer_state()
        state["step"] += 100  # a copy
        head = view.model.head.clone()
        seen[view.step] = head, view.settings.lr_scale, int(view.optimizer_state()["step"])
        return view.step == 4

    trained = paceline.pretrain(config, out=tmp_path / "seen", on_step=look, on_step_at=range(0, 7, 2))
    assert [(step, slots) for step, (_, _, slots) in seen.items()] == [(0, 0), (2, 2), (4, 4)]
    assert not trained.card.finished
    done = trained.card.steps_done
    assert losses(tmp_path / "seen") == losses(tmp_path / "unseen")[:done]
    assert torch.equal(seen[4][0], weights(tmp_path / "seen")["head"]) == (done == 4)
    assert not torch.equal(seen[2][0], seen[4][0])


def test_a_look_that_changes_a_weight_ends_the_run(tmp_path: Path) -> None:
    config = replace(tiny_config(tmp_path / "data"), steps=2)
    with pytest.raises(paceline.PacelineError, match="on_step has changed head at step 1; it may only look"):
        paceline.pretrain(
            config, out=tmp_path / "run", on_step=lambda view: view.step == 1 and view.model.head.add_(1.0) is None
        )
