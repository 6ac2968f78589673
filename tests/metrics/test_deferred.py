"""Records are written in order, each when its values have arrived, and the device is waited for only in `flush`."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from paceline.metrics import deferred
from paceline.metrics.deferred import DeferredMetrics
from paceline.metrics.metrics_file import Metrics, StepMetrics


class Kept:
    """A sink that keeps what it gets."""

    name, required = "kept", True

    def __init__(self) -> None:
        self.steps: list[StepMetrics] = []

    def write(self, metrics: Metrics) -> None:
        assert isinstance(metrics, StepMetrics)
        self.steps.append(metrics)

    def close(self) -> None: ...


def record(step: int) -> StepMetrics:
    return StepMetrics(
        step=step, train_loss=None, lr_scale=1.0, tokens=step, train_s=0.0, wall_s=0.0, tokens_per_s=None
    )


def test_the_loss_and_everything_else_find_their_places() -> None:
    sink = Kept()
    DeferredMetrics(sink).step(
        record(1), {"norm": torch.tensor(2.0), "train_loss": torch.tensor(0.1), "variance": None, "bytes": 7}
    )
    assert sink.steps[0].train_loss == torch.tensor(0.1).item()
    assert sink.steps[0].extra == {"norm": 2.0, "variance": None, "bytes": 7}


@pytest.fixture
def slow_copies(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Copies that arrive only when their number is put into this set, as on a device that is behind."""
    arrived: set[int] = set()
    numbers = iter(range(100))

    def copy(values: Tensor) -> tuple[Tensor, Callable[[], bool]]:
        number = next(numbers)
        return values, lambda: number in arrived

    monkeypatch.setattr(deferred, "copy_to_host", copy)
    return arrived


def test_a_late_value_holds_up_its_record_and_those_after_it(slow_copies: set[int]) -> None:
    sink = Kept()
    records = DeferredMetrics(sink)
    for step in range(3):
        records.step(record(step), {"train_loss": torch.tensor(float(step))})
    assert sink.steps == []
    slow_copies |= {1, 2}  # out of order: 0 is still on its way
    records.step(record(3), {"train_loss": torch.tensor(3.0)})
    assert sink.steps == []
    slow_copies.add(0)
    records.step(record(4), {"train_loss": torch.tensor(4.0)})
    assert [r.step for r in sink.steps] == [0, 1, 2]
    records.flush()
    assert [(r.step, r.train_loss) for r in sink.steps] == [(step, float(step)) for step in range(5)]
