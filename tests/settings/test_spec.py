"""The description of a model is the model: names, shapes, formats, order and start of every parameter, and every
product with a weight."""

import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from torch import nn

from model.random_configs import model_configs
from paceline.model.gpt import GPT
from paceline.model.ops import declare, torch_dtype
from paceline.recipes.presets import PRESETS, preset
from paceline.recipes.scaling import scaled
from paceline.settings import spec
from paceline.settings.model import LayerOverride, ModelConfig
from paceline.settings.spec import describe

SMALL = scaled(preset("r18-softcap"), 1 / 64).model
Declared = list[tuple[str, tuple[int, ...], torch.dtype]]


def declared(part: spec.Part | spec.Description) -> Declared:
    return [(p.name, p.shape, torch_dtype(p.dtype)) for p in part.parameters]


def registered(named: list[tuple[str, nn.Parameter]]) -> Declared:
    return [(name, tuple(parameter.shape), parameter.dtype) for name, parameter in named]


def own(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """What a module itself holds, entries of its dictionaries included, not its sub-layers."""
    held = list(module.named_parameters(recurse=False))
    for name, child in module.named_children():
        if isinstance(child, nn.ParameterDict):
            held += [(f"{name}.{key}", parameter) for key, parameter in child.items()]
    return held


def check(config: ModelConfig) -> None:
    model = GPT(config, end_of_text=0)
    assert registered(list(model.named_parameters())) == declared(describe(config))
    parts = {"": spec.trunk(config), "embeddings": spec.embeddings(config), "final_norm": spec.norm(config)}
    for layer in config.layers:
        at = f"blocks.{layer.index}"
        parts[at] = spec.block(config, layer)
        if layer.attention is not None:
            parts[f"{at}.attention_norm"] = spec.norm(config)
            parts[f"{at}.attention"] = spec.attention(config, layer.attention)
        if layer.mlp_width:
            parts[f"{at}.mlp_norm"] = spec.norm(config)
            parts[f"{at}.mlp"] = spec.mlp(config, layer)
    for path, part in parts.items():
        assert registered(own(model.get_submodule(path))) == declared(part), path
    holders = {path for path, module in model.named_modules() if list(module.parameters(recurse=False))}
    assert holders <= set(parts) | {"embeddings.values", "embeddings.ngrams"}, (
        "nobody registers a parameter that no part declares"
    )


def check_products(config: ModelConfig) -> None:
    """One for every matrix that a token is multiplied with, under its name and in its shape."""
    matrices = {p.name: p.shape for p in describe(config).parameters if p.group in ("matrices", "lm_head")}
    if config.tied_lm_head:
        matrices["head"] = next(p.shape for p in describe(config).parameters if p.name == "embeddings.token")
    products = {product.name: (product.outputs, product.inputs) for product in describe(config).products}
    assert products == matrices
    assert describe(config).product_weights() == sum(math.prod(shape) for shape in matrices.values())


@pytest.mark.parametrize("name", list(PRESETS))
def test_every_preset_registers_what_it_declares(name: str) -> None:
    config = scaled(preset(name), 1 / 16).model
    check(config)
    check_products(config)


@settings(max_examples=150)
@given(model_configs())
def test_any_model_registers_what_it_declares(config: ModelConfig) -> None:
    check(config)
    check_products(config)


@settings(max_examples=60)
@given(model_configs())
def test_any_model_starts_as_its_description_says(config: ModelConfig) -> None:
    named = dict(GPT(config, end_of_text=0).named_parameters())
    for parameter in describe(config).parameters:
        values, init = named[parameter.name].detach().float(), parameter.init
        if init.kind == "values":
            expected = torch.tensor(init.values).expand(values.shape)
            assert torch.equal(values, expected), parameter.name
        elif init.kind == "uniform":
            rounding = 1 + (2**-8 if parameter.rounded or parameter.dtype == "bf16" else 0)
            assert 0 < float(values.abs().max()) <= init.bound * rounding, parameter.name
        else:
            assert float(values.abs().max()) > 0, parameter.name
        if parameter.rounded:
            assert torch.equal(values, values.bfloat16().float()), parameter.name


def test_half_starts_every_matrix_with_a_deviation_of_half_over_the_root_of_the_width() -> None:
    """Whatever its inputs: at a width of 64 those of `down` are 256."""
    config = ModelConfig(width=64, num_heads=2, head_dim=32, num_layers=1, vocab_size=16, matrix_init="half")
    matrices = GPT(config, end_of_text=0).parameter_groups()["matrices"]
    assert {weight.size(1) for weight in matrices.values()} == {64, 256}
    for name, weight in matrices.items():
        assert float(weight.detach().std()) == pytest.approx(0.5 / 8, rel=0.05), name


@settings(max_examples=60)
@given(model_configs())
def test_fused_matrices_are_declared_as_the_matrices_in_them(config: ModelConfig) -> None:
    for parameter in describe(config).parameters:
        if parameter.group != "matrices":
            assert not parameter.parts
            continue
        assert sum(rows for rows, _ in parameter.matrices()) == parameter.shape[0]
        assert {columns for _, columns in parameter.matrices()} == {parameter.shape[1]}
        assert bool(parameter.parts) == parameter.name.endswith(".qkv")


def test_a_parameter_that_no_part_declares_is_refused_before_anything_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The optimizer would never move it."""

    def with_gain(module: nn.Module, part: spec.Part) -> None:
        declare(module, part)
        module.register_parameter("gain", nn.Parameter(torch.ones(())))

    monkeypatch.setattr("paceline.model.block.declare", with_gain)
    monkeypatch.setattr("paceline.model.ops._start", lambda *_, **__: pytest.fail("initial values were drawn"))
    with pytest.raises(ValueError, match=r"blocks\.0\.gain is registered by a module, but not declared in settings"):
        GPT(SMALL, end_of_text=0)


def test_a_declared_parameter_that_no_module_registers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.model.block.declare", lambda module, part: None)
    with pytest.raises(ValueError, match=r"blocks\.0\.x0_mix is declared in settings/spec\.py, but not registered"):
        GPT(SMALL, end_of_text=0)


def test_a_parameter_that_is_declared_twice_is_refused_when_a_config_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def two_heads(config: ModelConfig) -> spec.Part:
        (head,) = (each for each in trunk(config).parameters if each.name == "head")
        return spec.Part((head, replace(head, group="matrices")))

    trunk, config = spec.trunk, preset("demo")
    monkeypatch.setattr(spec, "trunk", two_heads)
    with pytest.raises(ValueError, match=r"declares parameter head 2 times, in groups 'lm_head', 'matrices'"):
        replace(config, model=replace(config.model, softcap=12.5))  # which no other test describes


def test_counts_are_by_group_or_of_all() -> None:
    description = describe(preset("r18-softcap").model)
    groups = {parameter.group for parameter in description.parameters}
    assert sum(description.numel(group) for group in groups) == description.numel()
    assert description.numel("embeddings", "lm_head") == description.numel("embeddings") + description.numel("lm_head")
    assert description.nbytes("embeddings") == 2 * description.numel("embeddings")  # bf16
    assert description.nbytes("matrices") == 4 * description.numel("matrices")
    assert description.numel("no such group") == 0


def test_describing_a_model_does_not_import_torch() -> None:
    code = (
        "import sys; from paceline.settings.spec import describe; from paceline.recipes.presets import preset; "
        "describe(preset('r18-softcap').model); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("qkv", ["separate", "fused"])
def test_queries_and_keys_of_so_many_heads_are_a_matrix_and_values_stay_one(qkv: str) -> None:
    """Six heads of 128, in one layer of 64: three matrices of two heads each for queries and for keys."""
    base = preset("r18-softcap").model
    overrides = (LayerOverride(layers=(3,), qk_dim=64),)
    paired = describe(replace(base, qkv=qkv, qk_matrix_heads=2, layer_overrides=overrides))  # type: ignore[arg-type]
    shapes = {each.name: each.matrices() for each in paired.parameters if each.group == "matrices"}
    for layer, rows in ((0, 256), (3, 128)):
        path, pair = f"blocks.{layer}.attention.", [(rows, 768)] * 3
        if qkv == "fused":
            assert shapes[f"{path}qkv"] == [*pair, *pair, (768, 768)]
        else:
            assert [shapes[path + name] for name in ("query", "key", "value")] == [pair, pair, [(768, 768)]]
    assert paired.numel() == describe(replace(base, qkv=qkv, layer_overrides=overrides)).numel()  # type: ignore[arg-type]
