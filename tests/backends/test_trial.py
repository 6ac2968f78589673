"""How a trial of the attention kernels on a GPU that they were not timed on is judged. A stand-in takes their place and
a CPU that of the GPU, so nothing here needs either; the kernels themselves are tried in
kernels/test_attention_async_gpu.py."""

import re
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.backends import ranges
from paceline.backends.registry import Request, choose
from paceline.core import probe
from paceline.core.errors import ConfigError
from paceline.kernels.attention import attend_dense
from paceline.recipes.presets import preset

Attend = Callable[..., Tensor]
OLDER = probe.Verdict(name="ranges", usable=True, reason="a GPU, capability 8.9")
NOT_OURS = probe.Verdict(name="own_kernels", usable=False, reason="a GPU, capability 8.9")


def right(q: Tensor, k: Tensor, v: Tensor, first_key: Tensor, end_query: Tensor, *, scale: float) -> Tensor:
    """Attention over the intervals, by their definition, with what the kernels take and return in bf16."""
    position = torch.arange(q.size(1))
    mask = (first_key[:, :, None] <= position) & (position <= position[:, None])
    return attend_dense(q.float(), k.float(), v.float(), mask, scale=scale).bfloat16()


class _WrongBackward(torch.autograd.Function):
    """Its input as it is; a gradient times a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad * ctx.factor, None


def off_forward(*given: Any, scale: float) -> Tensor:
    return right(*given, scale=1.1 * scale)


def wrong_gradient(factor: float) -> Attend:
    def attend(q: Tensor, *others: Any, scale: float) -> Tensor:
        return right(_WrongBackward.apply(q, factor), *others, scale=scale)  # type: ignore[no-untyped-call]

    return attend


def raising(error: Exception) -> Attend:
    def attend(*_: Any, **__: Any) -> Tensor:
        raise error

    return attend


def tried(attend: Attend, monkeypatch: pytest.MonkeyPatch, width: int = 64) -> str | None:
    """What a trial finds of these kernels."""
    monkeypatch.setitem(sys.modules, "paceline.kernels.attention_ranges", SimpleNamespace(attend_ranges=attend))
    return ranges.failed_trial.__wrapped__(width, "cpu")


@pytest.mark.parametrize("width", [64, 128])
def test_kernels_that_are_right_pass(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tried(right, monkeypatch, width) is None


@pytest.mark.parametrize(
    ("attend", "off"),
    [
        (off_forward, r"\d+\.\d%"),
        (wrong_gradient(0.9), r"\d+\.\d%"),
        (wrong_gradient(float("nan")), "nan%"),
        (lambda *given, scale: right(*given, scale=scale) * float("nan"), "nan%"),
    ],
    ids=["output", "gradient", "gradient of nan", "output of nan"],
)
def test_kernels_that_are_off_are_refused_with_the_error(
    attend: Attend, off: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In value or gradient, also where a number is none."""
    said = tried(attend, monkeypatch)
    assert said is not None
    assert re.fullmatch(f"a trial of the Triton kernels is off by {off}", said)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("no such instruction\nptxas died here"), "failed: RuntimeError: no such instruction"),
        (ImportError("libcuda.so.1: cannot open"), "failed: ImportError: libcuda.so.1: cannot open"),
        (AssertionError(), "failed: AssertionError"),
        (ValueError("x" * 1000), f"failed: ValueError: {'x' * 100}"),
    ],
)
def test_kernels_that_raise_are_refused_in_one_short_line(
    error: Exception, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = tried(raising(error), monkeypatch)
    assert found is not None
    assert said in found
    assert "\n" not in found
    assert len(found) < 300


def test_attention_falls_back_by_the_verdict_and_a_named_back_end_is_refused_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(probe, "ranges_attention", lambda device: OLDER)
    monkeypatch.setattr(probe, "own_kernels", lambda device: NOT_OURS)
    monkeypatch.setitem(sys.modules, "paceline.kernels.attention_ranges", SimpleNamespace(attend_ranges=off_forward))
    trial = ranges.failed_trial.__wrapped__
    monkeypatch.setattr(ranges, "failed_trial", lambda width: trial(width, "cpu"))
    request = Request(model=preset("r18-softcap").model, device="cuda", compute="bf16", compiled=False)
    chosen = choose("attention", "auto", request)
    assert chosen.name == "reference"
    assert "a trial of the Triton kernels is off by" in chosen.reason
    with pytest.raises(ConfigError, match=r"--attention\.backend ranges cannot be used: a trial of the Triton kernels"):
        choose("attention", "ranges", request)
    monkeypatch.setattr(ranges, "failed_trial", lambda width: None)
    assert choose("attention", "auto", request).name == "ranges"
