"""Models of a plain GPT-2's or Llama's shape go to transformers' own classes, with the same logits and the same text.

`GPT2LMHeadModel` with `torch.optim.AdamW` is also the judge of `r01-baseline`: of its forward pass, its gradient and
its first updates. Neither knows our code."""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, pipeline

from optim.building import optimizer_of
from paceline.cli import main
from paceline.evaluate.config import SamplingConfig
from paceline.evaluate.export.stock import Shape, stock_config, stock_shape, stock_weights
from paceline.evaluate.generate import sample_text
from paceline.evaluate.load import load_run
from paceline.model.gpt import GPT
from paceline.model.masks import window_tensor
from paceline.recipes.presets import PRESETS, preset
from paceline.settings.model import ModelConfig
from paceline.settings.schedule import schedule as settings_of
from train.tiny import run, tiny_config

SHAPES: dict[str, Shape] = {"r01-baseline": "gpt2", "llama-style": "llama"}
CLASSES: dict[Shape, Any] = {"gpt2": (GPT2Config, GPT2LMHeadModel), "llama": (LlamaConfig, LlamaForCausalLM)}
FP32 = {"rtol": 1e-4, "atol": 1e-4}


def drawn(*shape: int, below: int = 61, seed: int = 0) -> Tensor:
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(seed))


def padded(prompts: list[Tensor]) -> dict[str, Tensor]:
    """A batch that is filled on the left."""
    longest = max(map(len, prompts))
    return {
        "input_ids": torch.stack([torch.cat([p.new_zeros(longest - len(p)), p]) for p in prompts]),
        "attention_mask": torch.stack([(torch.arange(longest) >= longest - len(p)).long() for p in prompts]),
    }


BEYOND: list[dict[str, Any]] = [
    {"softcap": 15.0},
    {"document_mask": True},
    {"qk_norm": "after_rotary"},
    {"x0_mix": True},
    {"layers_without_attention": (0,)},
    {"norm": "rms"},
    {"vocab_size": 50_000, "lm_head_multiple": 128, "tied_lm_head": False},
]


def narrow(name: str, **changes: Any) -> ModelConfig:
    model = preset(name).model
    small = {"vocab_size": 61, "width": 48, "num_layers": 3, "num_heads": 6, "head_dim": 8}
    small |= {"precision": replace(model.precision, compute="fp32"), "rotary": replace(model.rotary, max_tokens=300)}
    return replace(model, **(small | changes))


def ours(name: str, **changes: Any) -> GPT:
    """With a start that no norm, bias or position leaves out."""
    model, generator = GPT(narrow(name, **changes), end_of_text=0, seed=1), torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def theirs(model: GPT) -> Any:
    shape = stock_shape(model.config)
    assert shape is not None
    config, kind = CLASSES[shape]
    other = kind(config(**stock_config(model.config, shape, sequence_tokens=256, end_of_text=0)))
    missing, unexpected = other.load_state_dict(stock_weights(model.config, shape, model.state_dict()), strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}, "a tied head is no tensor of its own"
    return other.eval()


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("r01-baseline", {}),
        ("r01-baseline", {"tied_lm_head": False, "activation": "gelu", "qkv": "separate", "lm_head_init": "gpt2"}),
        ("llama-style", {}),
        ("llama-style", {"num_kv_heads": 2, "tied_lm_head": True}),
        ("llama-style", {"qkv": "fused", "num_kv_heads": 3}),
    ],
)
def test_logits_are_ours(name: str, changes: dict[str, Any]) -> None:
    """Llama's frequencies are rounded in another order, which positions multiply: hence not the same bits."""
    model, tokens = ours(name, **changes), drawn(2, 256)
    with torch.no_grad():
        expected = model.logits(tokens, window_tensor((), tokens.device))
        found = theirs(model)(tokens).logits
    assert expected.std() > 0.3
    torch.testing.assert_close(found, expected, **FP32)


@pytest.mark.parametrize("name", SHAPES)
def test_a_padded_batch_generates_what_each_prompt_generates_alone(name: str) -> None:
    model = ours(name)
    prompts = [drawn(length, seed=length) for length in (40, 7)]
    batch = theirs(model).generate(**padded(prompts), max_new_tokens=8, do_sample=False, eos_token_id=None)
    for row, prompt in enumerate(prompts):
        text = prompt
        for _ in range(8):
            with torch.no_grad():
                logits = model.logits(text[None], window_tensor((), text.device))
            text = torch.cat([text, logits[0, -1].argmax()[None]])
        assert torch.equal(batch[row, -8:], text[-8:])


def test_the_two_presets_are_stock_and_what_goes_beyond_is_not() -> None:
    assert {name: shape for name in PRESETS if (shape := stock_shape(preset(name).model))} == SHAPES
    for name in SHAPES:
        for change in BEYOND:
            assert stock_shape(replace(preset(name).model, **change)) is None, change  # type: ignore[arg-type]
    turned = replace(preset("llama-style").model.rotary, rotary_fraction=0.5)
    assert stock_shape(replace(preset("llama-style").model, rotary=turned)) is None
    assert stock_shape(replace(preset("r01-baseline").model, num_kv_heads=4)) is None


def llm_c_rate(step: int, steps: int, warmup: int) -> float:
    """As the schedule of llm.c is stated: a line over the warm-up, then a cosine to 0."""
    if step < warmup:
        return 6e-4 * (step + 1) / warmup
    return 6e-4 * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))


def without_key_bias(name: str, tensor: Tensor) -> Tensor:
    """The scores of a query all move alike with it, so its gradient is 0 but for rounding, which Adam makes large."""
    return torch.cat([tensor[:48], tensor[96:]]) if name.endswith("c_attn.bias") else tensor


def test_r01_learns_as_gpt2_under_torch_adamw_does() -> None:
    """Six steps with warm-up, cosine, clipping, and decay of what has two dimensions."""
    config = replace(preset("r01-baseline"), steps=6)
    config = replace(
        config, optim=replace(config.optim, schedule=replace(config.optim.schedule, warmup_steps=2), clip_norm=0.5)
    )
    model = ours("r01-baseline")
    other = theirs(model).train()
    optimizer = optimizer_of(model.parameter_groups(), config.optim)
    decayed = [p for p in other.parameters() if p.dim() >= 2]
    others = [p for p in other.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    judge = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    for step in range(6):
        tokens = drawn(4, 65, seed=step)
        loss = model(tokens[:, :-1], tokens[:, 1:], window_tensor((), tokens.device)).main.mean()
        expected = torch.nn.functional.cross_entropy(
            other(tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten()
        )
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
        loss.backward()
        expected.backward()
        assert torch.nn.utils.clip_grad_norm_(other.parameters(), 0.5) > 0.5, "clipping acts"
        optimizer.step(settings_of(config, step).groups)
        for group in judge.param_groups:
            group["lr"] = llm_c_rate(step, 6, 2)
        judge.step()
        judge.zero_grad()
        optimizer.zero_grad()
    expected_weights: Mapping[str, Tensor] = dict(other.named_parameters())
    for name, tensor in stock_weights(model.config, "gpt2", model.state_dict()).items():
        mine, other_one = (without_key_bias(name, each.detach()) for each in (tensor, expected_weights[name]))
        off = (mine - other_one).abs()
        assert off.mean() < 1e-6, name  # of updates of 2e-3 in all
        assert off.quantile(0.999) < 1e-4, name


def small_run(name: str, folder: Path) -> Path:
    """Long enough to write more than one letter."""
    config = tiny_config(folder / "data")
    recipe = preset(name)
    model = replace(narrow(name), vocab_size=257, rotary=replace(recipe.model.rotary, max_tokens=512))
    schedule = replace(recipe.optim.schedule, warmup_steps=3)
    rates = dict.fromkeys(("embedding_lr", "matrix_lr", "vector_lr", "lm_head_lr"), 0.01)
    optim = replace(recipe.optim, schedule=schedule, adam=replace(recipe.optim.adam, **rates))
    run(replace(config, steps=40, model=model, optim=optim, preset=name), folder / "run")
    return folder / "run"


@pytest.mark.parametrize("name", [*SHAPES, "demo"])
def test_a_pipeline_writes_what_sample_writes(name: str, tmp_path: Path) -> None:
    """With no more said than the folder; the demo brings its own code."""
    if name == "demo":
        run(replace(tiny_config(tmp_path / "data"), steps=40), trained := tmp_path / "run")
    else:
        trained = small_run(name, tmp_path)
    folder = tmp_path / "hf"
    assert main(["export", str(trained), "--out", str(folder)]) == 0
    code = sorted(path.name for path in folder.glob("*.py"))
    assert bool(code) == ("trust_remote_code" in (folder / "README.md").read_text()) == (name == "demo")
    more: dict[str, Any] = {"trust_remote_code": True} if name == "demo" else {}
    write = pipeline("text-generation", model=str(folder), **more)
    loaded, greedy = load_run(str(trained), device="cpu"), SamplingConfig(temperature=0.0)
    written = set()
    for prompt in ("the cat", "birds sing in", "a"):
        [found] = write(prompt, do_sample=False, max_new_tokens=30)
        text = sample_text(loaded.model, loaded.tokenizer, prompt, greedy, windows=loaded.windows, new_tokens=30)
        assert found["generated_text"] == text
        written.add(text.removeprefix(prompt))
    assert len(written) > 1, "the prompt reaches the text"


@pytest.mark.parametrize("name", SHAPES)
def test_an_export_of_a_stock_shape_needs_no_code_of_ours(name: str, tmp_path: Path) -> None:
    trained = small_run(name, tmp_path)
    assert main(["export", str(trained), "--out", str(tmp_path / "hf")]) == 0
    assert "auto_map" not in json.loads((tmp_path / "hf" / "config.json").read_text())
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert type(model) is CLASSES[SHAPES[name]][1]
    assert not any(report.values())
    loaded, tokens = load_run(str(trained), device="cpu"), drawn(2, 200, below=257)
    with torch.no_grad():
        expected = loaded.model.logits(tokens, window_tensor((), tokens.device))
        torch.testing.assert_close(model(tokens).logits, expected, **FP32)
