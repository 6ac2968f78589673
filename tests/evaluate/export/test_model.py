"""The exported model is ours: the same logits for every preset, with a cache, and in a batch with padding."""

import ast
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from model.lively import BETWEEN_LAYERS, LAYERS_OF_MANY_SHAPES, PREVIOUS_TOKENS, WINDOWS, lively, small, windows_of
from paceline.core.probe import bf16_products
from paceline.evaluate.config import SamplingConfig
from paceline.evaluate.export import configuration_paceline, modeling_paceline
from paceline.evaluate.export.architecture import fixed_tensors, generation_config, hf_config, hf_weights
from paceline.evaluate.export.configuration_paceline import PacelineConfig
from paceline.evaluate.export.modeling_paceline import PacelineForCausalLM
from paceline.evaluate.generate import generate
from paceline.model.gpt import GPT
from paceline.model.masks import Windows, window_tensor
from paceline.recipes.presets import PRESETS
from paceline.recipes.scaling import scaled

GREEDY = SamplingConfig(temperature=0.0)
FP32 = {"rtol": 1e-4, "atol": 1e-4}
"""That one has tables of n-grams, which are refused below."""
every_unit = pytest.mark.parametrize("unit", WINDOWS)


def exported(model: GPT, *, window: int) -> PacelineForCausalLM:
    """The model as transformers would load it, without the way over files."""
    return exported_with(model, windows_of(model, window))


def exported_with(model: GPT, windows: Windows) -> PacelineForCausalLM:
    written = hf_config(model.config, sequence_tokens=256, windows=windows, end_of_text=model.end_of_text)
    other = PacelineForCausalLM(PacelineConfig(**written))
    other.load_state_dict(hf_weights(model.config, model.state_dict()) | fixed_tensors(model.config))
    other.generation_config.update(**generation_config(model.config, end_of_text=model.end_of_text))
    return other.eval()


def drawn(*shape: int, below: int = 61, seed: int = 0) -> Tensor:
    """Random tokens; some are 0, which opens a document."""
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(seed))


def padded(prompts: list[Tensor]) -> dict[str, Tensor]:
    """A batch that is filled on the left, by what ends a document, as the exported tokenizer does it."""
    longest = max(map(len, prompts))
    return {
        "input_ids": torch.stack([torch.cat([p.new_zeros(longest - len(p)), p]) for p in prompts]),
        "attention_mask": torch.stack([(torch.arange(longest) >= longest - len(p)).long() for p in prompts]),
    }


def our_logits(model: GPT, tokens: Tensor, window: int) -> Tensor:
    with torch.no_grad():
        return model.logits(tokens, window_tensor(windows_of(model, window), tokens.device))


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_gives_our_logits_past_its_window(name: str) -> None:
    config = scaled(PRESETS[name](), 1 / 16).model
    model = lively(GPT(replace(config, precision=replace(config.precision, compute="fp32")), end_of_text=0))
    tokens = drawn(2, 450, below=500)
    tokens[0, 200] = 0
    with torch.no_grad():
        found = exported(model, window=192)(tokens).logits
    expected = our_logits(model, tokens, 192)
    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected, **FP32)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_gives_our_logits_in_its_own_formats(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the records compute in bf16. Where this was written the two have the same bits; a CPU that sums in
    another order may make them differ, but not by more than bf16 differs from fp32."""
    if not bf16_products("cpu").usable:
        pytest.skip("this CPU has no bf16 products")
    config = scaled(PRESETS[name](), 1 / 16).model
    monkeypatch.setattr(
        PacelineForCausalLM, "products_dtype", lambda self, _: getattr(torch, self.config.compute_dtype)
    )
    model = lively(GPT(config, end_of_text=0))
    exact = GPT(replace(config, precision=replace(config.precision, compute="fp32")), end_of_text=0)
    exact.load_state_dict(model.state_dict())
    tokens = drawn(1, 200, below=500)
    with torch.no_grad():
        found = exported(model, window=128)(tokens).logits
    expected, in_fp32 = our_logits(model, tokens, 128), our_logits(exact, tokens, 128)
    rounding = (expected - in_fp32).square().mean().sqrt()
    assert (found - expected).square().mean().sqrt() <= rounding + 1e-5


@every_unit
def test_padding_on_the_left_shifts_nothing(unit: str) -> None:
    model = small(unit)
    other = exported(model, window=192)
    prompts = [drawn(length, seed=length) for length in (3, 299, 300, 172)]  # 300 - 172: a whole block of padding
    with torch.no_grad():
        found = other(**padded(prompts)).logits
    for row, prompt in enumerate(prompts):
        expected = our_logits(model, prompt[None], 192)[0]
        torch.testing.assert_close(found[row, -len(prompt) :], expected, **FP32)


@every_unit
def test_a_batch_of_unequal_prompts_generates_what_each_generates_alone_with_and_without_a_cache(unit: str) -> None:
    model = small(unit)
    other = exported(model, window=128)
    prompts = [drawn(length, seed=length) for length in (250, 7, 130)]
    batch = padded(prompts)
    cached, plain = (
        other.generate(**batch, max_new_tokens=12, do_sample=False, use_cache=use_cache) for use_cache in (True, False)
    )
    assert torch.equal(cached, plain)
    for row, prompt in enumerate(prompts):
        alone = list(generate(model, prompt.tolist(), GREEDY, windows=windows_of(model, 128), new_tokens=12))
        assert cached[row, batch["input_ids"].size(1) :][: len(alone)].tolist() == alone


def logits_by_pieces(other: PacelineForCausalLM, pieces: Iterable[Tensor]) -> Tensor:
    """Each piece after those before it, which are in the cache."""
    cache, found = None, []
    for piece in pieces:
        with torch.no_grad():
            output = other(piece, past_key_values=cache)
        cache = output.past_key_values
        found.append(output.logits)
    return torch.cat(found, dim=1)


def test_pieces_of_any_length_give_the_logits_of_the_whole() -> None:
    model, tokens = small("blocks"), drawn(3, 300)
    found = logits_by_pieces(exported(model, window=256), tokens.split([1, 130, 1, 126, 42], dim=1))
    torch.testing.assert_close(found, our_logits(model, tokens, 256), **FP32)


@pytest.mark.parametrize(
    "changes",
    [
        {"softcap": 3.0, "softcap_shift": 1.0},
        {"value_path": "residual"},
        {"value_path": "layerwise", "value_lambdas": 1},
        {"value_path": "mirrored", "value_storage": "chunks"},
        {"value_path": "plain"},
        {"qkv": "fused"},
        {"qk_norm": "after_rotary", "activation": "gelu", "attention_branch_scale": 0.3},
        {"tied_lm_head": True, "embedding_multiple": 16},
        {"norm": "layer", "biases": True, "positions": "learned", "activation": "gelu_tanh", "qkv": "fused"},
        {"norm": "rms_weighted", "activation": "swiglu", "biases": True},
        {"norm": "layer"},
        {"layers_without_attention": (0, -1)},
        {"x0_mix": False, "unet_skips": False, "document_mask": False, "softcap": None, "embedding_norm": True},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_switches_in_other_combinations_than_the_presets_are_exported_too(changes: dict[str, Any]) -> None:
    model, tokens = small("blocks", **changes), drawn(2, 200)
    found = logits_by_pieces(exported(model, window=128), tokens.split([140, 60], dim=1))
    torch.testing.assert_close(found, our_logits(model, tokens, 128), **FP32)


@pytest.mark.parametrize(
    "changes",
    [LAYERS_OF_MANY_SHAPES, BETWEEN_LAYERS, PREVIOUS_TOKENS],
    ids=["shapes", "between layers", "previous tokens"],
)
def test_layers_of_many_kinds_with_two_windows_are_exported_too(changes: dict[str, Any]) -> None:
    model, tokens, windows = small("blocks", **changes), drawn(2, 500), (128, 384)
    found = logits_by_pieces(exported_with(model, windows), tokens.split([340, 160], dim=1))
    with torch.no_grad():
        expected = model.logits(tokens, window_tensor(windows, tokens.device))
    torch.testing.assert_close(found, expected, **FP32)


@pytest.mark.parametrize(
    "changes", [{}, PREVIOUS_TOKENS | {"long_window": WINDOWS["blocks"]}], ids=["plain", "previous"]
)
def test_padding_between_tokens_shifts_nothing_and_opens_no_document(changes: dict[str, Any]) -> None:
    """As when texts of a batch that are already in the cache go on with texts of unequal length."""
    model, tokens, gap = small("blocks", **changes), drawn(1, 200), 130
    tokens[0, 50:] += tokens[0, 50:] == 0
    filled = torch.cat([tokens[:, :100], tokens.new_zeros(1, gap), tokens[:, 100:]], dim=1)
    real = torch.ones_like(filled)
    real[:, 100 : 100 + gap] = 0
    with torch.no_grad():
        found = exported(model, window=256)(filled, attention_mask=real).logits
    torch.testing.assert_close(found[real.bool()], our_logits(model, tokens, 256)[0], **FP32)


def test_beams_take_their_documents_and_positions_with_them() -> None:
    other = exported(small("blocks"), window=128)
    batch = padded([drawn(200, seed=1), drawn(140, seed=2)])
    other.generation_config.eos_token_id = None  # documents may end, and the beams go on
    cached, plain = (
        other.generate(**batch, max_new_tokens=12, num_beams=4, use_cache=use_cache) for use_cache in (True, False)
    )
    assert torch.equal(cached, plain)


def test_a_pass_without_a_cache_makes_none() -> None:
    with torch.no_grad():
        assert exported(small("blocks"), window=128)(drawn(1, 5), use_cache=False).past_key_values is None


def test_labels_give_our_loss() -> None:
    model = small("blocks")
    tokens = drawn(2, 50)
    with torch.no_grad():
        losses = model(tokens[:, :-1], tokens[:, 1:], torch.tensor([128])).main
        found = exported(model, window=128)(tokens, labels=tokens).loss
    torch.testing.assert_close(found, losses.mean(), **FP32)


def test_rows_that_pad_the_head_are_never_generated() -> None:
    model = small("none")
    with torch.no_grad():
        model.head[61:] = 100.0 * model.head[:3]
    other = exported(model, window=0)
    assert other(drawn(1, 9)).logits.size(-1) == 64
    assert other.generate(drawn(1, 9) + 1, max_new_tokens=30, do_sample=True, temperature=3.0).max() < 61


def test_a_mask_of_four_axes_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="attention mask of \\(batch, tokens\\)"):
        exported(small("none"), window=0)(drawn(1, 2), attention_mask=torch.ones(1, 1, 2, 2))


@pytest.mark.parametrize("module", [configuration_paceline, modeling_paceline])
def test_the_files_that_travel_need_torch_and_transformers_only(module: object) -> None:
    tree = ast.parse(Path(str(module.__file__)).read_text())  # type: ignore[attr-defined]
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {node.names[0].name if isinstance(node, ast.Import) else node.module or "" for node in found}
    assert {name.split(".")[0] for name in names} <= {"torch", "transformers", "typing", "configuration_paceline"}
