"""Initial weights: their distributions, formats, and that each depends on nothing but seed, name and shape."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from model.small import END_OF_TEXT, RECORDS, small
from paceline.model.gpt import GPT
from paceline.settings.model import ModelConfig

BEFORE_13 = ("r04-muon", "r05-modern-arch")


def start(config: ModelConfig, *, seed: int = 0) -> dict[str, Tensor]:
    return dict(GPT(config, end_of_text=END_OF_TEXT, seed=seed).state_dict())


def assert_uniform(weight: Tensor, bound: float) -> None:
    """Flat on [-bound, bound]: by its edges, its deviation and its quarters, each to about five standard errors."""
    values = weight.float().flatten()
    n = values.numel()
    assert float(values.abs().max()) <= bound
    assert float(values.abs().max()) > bound * (1 - 20 / n)
    assert float(values.std()) == pytest.approx(bound / math.sqrt(3), rel=5 / math.sqrt(n))
    quarters = torch.histc(values, bins=4, min=-bound, max=bound) / n
    assert float((quarters - 0.25).abs().max()) < 2.5 / math.sqrt(n)


def assert_normal(weight: Tensor) -> None:
    values = weight.float().flatten()
    n = values.numel()
    assert abs(float(values.mean())) < 5 / math.sqrt(n)
    assert float(values.std()) == pytest.approx(1.0, abs=5 / math.sqrt(n))
    assert float((values.abs() < 1).float().mean()) == pytest.approx(0.6827, abs=3 / math.sqrt(n))


@pytest.mark.parametrize("name", RECORDS)
def test_matrices_start_uniform_by_their_inputs_and_outputs_at_zero(name: str) -> None:
    config = small(name)
    for key, weight in start(config).items():
        if not key.startswith("blocks.") or weight.dim() < 2:
            continue
        if config.zero_init_outputs and key.endswith(("attention.output", "mlp.down")):
            assert not weight.any(), key
        elif not config.precision.round_matrices_at_init:  # rounding may step over the bound
            assert_uniform(weight, 1 / math.sqrt(weight.size(1)))
        else:
            assert_uniform(weight, float(torch.tensor(1 / math.sqrt(weight.size(1))).bfloat16()) + 2**-12)


def test_only_record_4_starts_with_outputs_that_act() -> None:
    assert not small("r04-muon").zero_init_outputs
    assert all(small(name).zero_init_outputs for name in RECORDS[1:])


def test_the_bound_at_full_width_is_the_records() -> None:
    """In = 768: bound 0.036084, deviation 0.020833; checked on one wide matrix."""
    config = replace(ModelConfig(num_layers=1, vocab_size=64), layers_without_attention=(0,))
    up = start(config)["blocks.0.mlp.up"]
    assert up.shape == (3072, 768)
    assert_uniform(up, 0.0360844)
    assert float(up.std()) == pytest.approx(0.020833, rel=1e-3)


@pytest.mark.parametrize("name", RECORDS)
def test_tables_and_head_start_as_the_record_does(name: str) -> None:
    config = small(name)
    weights = start(config)
    if name in BEFORE_13:
        assert "head" not in weights
        assert_uniform(weights["embeddings.token"], 1 / math.sqrt(config.width))
    else:
        assert not weights["head"].any()
        for key, table in weights.items():
            if key.startswith("embeddings."):
                assert_normal(table)


def test_an_untied_head_may_start_uniform() -> None:
    assert_uniform(start(replace(small("r18-softcap"), lm_head_init="uniform"))["head"], 1 / math.sqrt(48))


@pytest.mark.parametrize("name", RECORDS[2:])
def test_scalars_start_so_that_blocks_skips_and_mixes_are_the_records(name: str) -> None:
    weights = start(small(name))
    for key, value in weights.items():
        if key.endswith("x0_mix"):
            assert value.tolist() == [1.0, 0.0]
        elif key.endswith("value_mix"):
            assert value.tolist() == ([0.5] if name <= "r14-value-embed" else [0.5, 0.5])
    assert weights["skip_weights"].tolist() == [1.0] * 6


@pytest.mark.parametrize("name", RECORDS)
def test_each_group_is_stored_in_the_records_format(name: str) -> None:
    model = GPT(small(name), end_of_text=END_OF_TEXT)
    tables = torch.float32 if name in BEFORE_13 else torch.bfloat16
    scalars = torch.float32 if name in (*BEFORE_13, "r18-softcap") else torch.bfloat16
    expected = {"matrices": torch.float32, "lm_head": torch.float32, "scalars": scalars}
    expected |= {"embeddings": tables, "value_embeddings": tables}
    for group, parameters in model.parameter_groups().items():
        assert {parameter.dtype for parameter in parameters.values()} == {expected[group]}, group


@pytest.mark.parametrize("name", RECORDS)
def test_records_13_to_17_start_from_matrices_rounded_through_bf16(name: str) -> None:
    query = start(small(name)).get("blocks.0.attention.query")
    if query is None:
        query = start(small(name))["blocks.0.attention.qkv"]
    rounded = torch.equal(query, query.bfloat16().float())
    assert rounded == ("r13" <= name < "r18")


CHANGES: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"x0_mix": False}, ()),
    ({"unet_skips": False}, ()),
    ({"value_path": "plain"}, ()),
    ({"value_path": "layerwise"}, ()),
    ({"value_path": "mirrored"}, ()),
    ({"value_lambdas": 1}, ("value_mix",)),
    ({"layers_without_attention": ()}, ()),
    ({"softcap": None}, ()),
    ({"qk_norm": "none"}, ()),
    ({"document_mask": False}, ()),
    ({"embedding_norm": False}, ()),
    ({"attention_branch_scale": 0.5}, ()),
    ({"tied_lm_head": True}, ()),
    ({"num_layers": 10}, ("skip_weights",)),
    ({"zero_init_outputs": False}, ("attention.output", "mlp.down")),
    ({"lm_head_init": "uniform"}, ("head",)),
    ({"num_kv_heads": 2}, ("attention.key", "attention.value", "values.0", "values.1", "values.2")),
]


@pytest.mark.parametrize(("change", "touched"), CHANGES, ids=["-".join(map(str, *c.items())) for c, _ in CHANGES])
def test_a_switch_leaves_every_other_parameters_start_as_it_was(
    change: dict[str, Any], touched: tuple[str, ...]
) -> None:
    """So the arms of an ablation start from the same place. `touched`: what the switch itself is about."""
    config = small("r18-softcap")
    before, after = start(config), start(replace(config, **change))
    differing = {
        key
        for key in before.keys() & after.keys()
        if before[key].shape != after[key].shape or not torch.equal(before[key], after[key])
    }
    assert differing == {key for key in before.keys() & after.keys() if key.endswith(touched or ("-",))}


def test_the_start_follows_the_seed_and_leaves_the_global_generator_alone() -> None:
    config = small("r18-softcap")
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = start(config, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    again, other = start(config, seed=3), start(config, seed=4)
    drawn = [key for key, value in first.items() if value.dim() == 2 and value.any()]
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not any(torch.equal(first[key], other[key]) for key in drawn)


def test_a_model_that_is_given_no_seed_starts_as_that_of_seed_0() -> None:
    config = small("r18-softcap")
    unstated, stated = GPT(config, end_of_text=END_OF_TEXT).state_dict(), start(config, seed=0)
    assert all(torch.equal(unstated[key], stated[key]) for key in stated)


def test_no_two_parameters_start_alike() -> None:
    weights = start(small("r18-softcap"))
    queries = [weights[f"blocks.{layer}.attention.{kind}"] for layer in (0, 1) for kind in ("query", "key", "value")]
    tables = [weights["embeddings.token"], *(weights[f"embeddings.values.{i}"] for i in range(3))]
    for group in (queries, tables):
        for i, one in enumerate(group):
            assert not any(torch.equal(one, other) for other in group[i + 1 :])
