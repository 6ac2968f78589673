"""FlashAttention over packed documents: what it is given is the mask, what it cannot do is refused. Its values are
compared on a GPU, in test_attention_varlen_gpu.py."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from torch._subclasses.fake_tensor import FakeTensorMode

from model.mask_cases import Case, cases, expected
from model.small import windows
from paceline.backends.attention_plans import plan_packed
from paceline.backends.registry import Request, choose, find
from paceline.core import probe
from paceline.core.errors import ConfigError
from paceline.kernels.attention_varlen import keys_before, places_for, segment_starts, sequence_starts
from paceline.parallel.machine import choose_backends
from paceline.recipes.presets import preset
from paceline.settings.backends import AttentionConfig
from paceline.settings.model import LayerOverride, ModelConfig, WindowConfig


def mask_of(starts: np.ndarray, left: int, total: int) -> np.ndarray:
    """The rule in words: a query sees the keys of its segment, itself and at most `left` before it; -1: all."""
    segment = np.searchsorted(starts, np.arange(total), side="right")
    q, k = np.ogrid[:total, :total]
    seen = (segment[:, None] == segment[None, :]) & (k <= q)
    return seen if left < 0 else seen & (q - k <= left)


@settings(max_examples=30)
@given(cases())
def test_segments_and_window_are_the_mask_and_sequences_do_not_see_each_other(case: Case) -> None:
    assume(not case.rule.window_in_blocks)
    _, documents, tokens, window = case.arguments()
    sequences = 2 if documents is None else documents.size(0)
    if documents is None:
        starts = sequence_starts(sequences, tokens, torch.device("cpu"))
    else:
        starts = segment_starts(documents)
        assert starts.numel() == places_for(documents.numel()) + 1  # whatever the documents are
    assert starts.dtype == torch.int32
    found = mask_of(starts.numpy(), keys_before(window if case.unit == "tokens" else None), sequences * tokens)
    for row in range(sequences):
        own = slice(row * tokens, (row + 1) * tokens)
        assert np.array_equal(found[own, own], expected(case)[row if documents is not None else 0])
        found[own, own] = False
    assert not found.any()


def test_more_documents_than_places_are_an_error_and_just_as_many_are_not() -> None:
    ids = torch.arange(2048, dtype=torch.int32)[None]
    places = places_for(2048)
    with pytest.raises(RuntimeError, match=f"2,048 tokens have more than {places} documents"):
        segment_starts(ids)
    assert segment_starts(ids.clamp(max=places - 1))[-2:].tolist() == [places - 1, 2048]
    assert places_for(100) == 100  # short sequences have a place for every token


@pytest.mark.parametrize("documents", [True, False])
@pytest.mark.parametrize("version", [2, 3])
def test_the_compiler_is_told_the_shapes_of_outputs_and_gradients(version: int, documents: bool) -> None:
    config = ModelConfig(head_dim=64, num_heads=4, width=256, num_kv_heads=2, window=WindowConfig(unit="tokens"))
    with FakeTensorMode():
        ids = torch.zeros(2, 384, dtype=torch.int32) if documents else None
        q, k, v = (torch.empty(2, 384, heads, 64, dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2, 2))
        y = plan_packed(version)(config, ids, 384, windows(0))(config.layers[0], q, k, v)
        grads = torch.autograd.grad(y.sum(), (q, k, v))
    assert [x.shape for x in (y, *grads)] == [q.shape, q.shape, k.shape, v.shape]


@pytest.mark.parametrize("backend", ["varlen", "fa3"])
def test_a_cpu_is_refused(backend: str) -> None:
    config = replace(preset("r13-window-warmup"), attention=AttentionConfig(backend=backend))
    with pytest.raises(ConfigError, match=rf"--attention\.backend {backend} cannot be used: .* needs a GPU; use"):
        choose_backends(config, "cpu", "fp32")


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    monkeypatch.setattr("torch.backends.cuda.is_flash_attention_available", lambda: True)
    monkeypatch.setattr(probe, "_load_fa3", lambda library: None)
    return monkeypatch


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("backend", ["varlen", "fa3"])
def test_windows_in_tokens_are_taken_and_windows_in_blocks_refused(backend: str) -> None:
    asked = AttentionConfig(backend=backend)
    for name in ("r13-window-warmup", "r14-value-embed"):
        chosen, _ = choose_backends(replace(preset(name), attention=asked), "cuda", "bf16")
        assert chosen.attention.name == backend
        assert chosen.windows_on_host
    for name, unit in (("r15-unet-values", "tokens_in_blocks"), ("r18-softcap", "blocks")):
        with pytest.raises(ConfigError, match=rf"--attention\.backend {backend} .*--model\.window\.unit {unit}; use"):
            choose_backends(replace(preset(name), attention=asked), "cuda", "bf16")
    with pytest.raises(ConfigError, match="bf16, not fp32"):
        choose_backends(replace(preset("r13-window-warmup"), attention=asked), "cuda", "fp32")


def packed(model: ModelConfig, **changes: str) -> Request:
    return Request(model=model, device="cuda", compute="bf16", **changes)  # type: ignore[arg-type]


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("backend", ["varlen", "fa3"])
def test_plain_causal_models_and_other_widths_do_not_fit(backend: str) -> None:
    causal, tokens, why_not = ModelConfig(), WindowConfig(unit="tokens"), find("attention", backend).why_not
    assert "causal" in str(why_not(packed(causal)))
    assert "--model.head-dim 32" in str(why_not(packed(ModelConfig(head_dim=32, num_heads=24, window=tokens))))
    assert why_not(packed(ModelConfig(head_dim=128, num_heads=6, window=tokens))) is None
    unequal = ModelConfig(window=tokens, layer_overrides=(LayerOverride(layers=(3,), v_dim=64),))
    assert "queries of 128 with values of 64" in str(why_not(packed(unequal)))


def test_a_missing_library_is_named_and_another_card_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = preset("r13-window-warmup").model
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    monkeypatch.setenv("PACELINE_FA3_LIBRARY", "/nowhere/fa3.so")
    with pytest.raises(ConfigError, match=r"--attention\.backend fa3 .*/nowhere/fa3\.so cannot be loaded"):
        choose("attention", "fa3", packed(model))
    monkeypatch.delenv("PACELINE_FA3_LIBRARY")
    monkeypatch.setattr(probe.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"flash_attn_interface is not installed and \$PACELINE_FA3_LIBRARY"):
        choose("attention", "fa3", packed(model))
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (8, 0))
    assert "8.0" in probe.flash_attention_3("cuda").reason
