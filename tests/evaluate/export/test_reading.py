"""An export read back is what was exported, whatever it renames, joins, turns or splits."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from paceline.core.errors import RunError
from paceline.evaluate.export.architecture import hf_weights
from paceline.evaluate.export.reading import read_export
from paceline.evaluate.export.stock import stock_shape, stock_weights
from paceline.model.gpt import GPT
from paceline.recipes.presets import preset
from paceline.settings.model import ModelConfig


def narrow(name: str, **changes: Any) -> ModelConfig:
    small = {"vocab_size": 61, "width": 48, "num_heads": 6, "head_dim": 8}
    return replace(preset(name).model, **(small | changes))


MODELS = {
    "r01-baseline": narrow("r01-baseline"),
    "r01-baseline, apart": narrow("r01-baseline", qkv="separate", tied_lm_head=False),
    "llama-style": narrow("llama-style"),
    "llama-style, joined": narrow("llama-style", qkv="fused", num_kv_heads=3),
    "r18-softcap": narrow("r18-softcap"),
    "r18-softcap, joined": narrow("r18-softcap", qkv="fused", value_storage="chunks", biases=True, norm="layer"),
}


def write(folder: Path, model: ModelConfig, *, kind: str | None = None) -> dict[str, torch.Tensor]:
    """An export of a model with weights of its own everywhere; the weights."""
    weights = {name: p.detach() for name, p in GPT(model, end_of_text=0).named_parameters()}
    generator = torch.Generator().manual_seed(1)
    weights = {name: torch.randn(p.shape, generator=generator).to(p.dtype) for name, p in weights.items()}
    shape = stock_shape(model)
    found = hf_weights(model, weights) if shape is None else stock_weights(model, shape, weights)
    save_file(found, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": kind or shape or "paceline"}))
    return weights


@pytest.mark.parametrize("name", MODELS)
def test_an_export_gives_back_the_weights_bit_for_bit(name: str, tmp_path: Path) -> None:
    weights = write(tmp_path, MODELS[name])
    found = read_export(tmp_path, MODELS[name])
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[key].to(weights[key].dtype), weights[key]) for key in weights)


def test_an_export_of_one_storage_is_read_by_a_model_of_another(tmp_path: Path) -> None:
    """Separate projections, exported, are what a model with one joined projection reads as one."""
    weights = write(tmp_path, MODELS["r18-softcap"])
    found = read_export(tmp_path, replace(MODELS["r18-softcap"], qkv="fused"))
    parts = [weights[f"blocks.0.attention.{part}"] for part in ("query", "key", "value")]
    assert torch.equal(found["blocks.0.attention.qkv"], torch.cat(parts))


def test_another_kind_of_model_and_another_width_are_named(tmp_path: Path) -> None:
    write(tmp_path, MODELS["llama-style"])
    with pytest.raises(RunError, match="holds a model of type llama, but this run's is of type gpt2"):
        read_export(tmp_path, MODELS["r01-baseline"])
    with pytest.raises(RunError, match=r"lm_head.weight is \(61, 48\) there and \(61, 24\) here"):
        read_export(tmp_path, narrow("llama-style", width=24, num_heads=3))
