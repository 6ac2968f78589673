"""The model's parts one by one: value path, skips, missing attention, cap, parameter groups and counts."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from model import plain
from model.small import END_OF_TEXT, RECORDS, in_fp32, random_tokens, shaken, small, windows
from paceline.model.block import relu_squared
from paceline.model.gpt import GPT
from paceline.model.loss import cap_logits
from paceline.model.ops import rms_norm
from paceline.recipes.presets import PRESETS, preset
from paceline.recipes.scaling import scaled
from paceline.settings.model import ModelConfig, RotaryConfig
from paceline.settings.spec import describe

TOKENS, WINDOW = random_tokens(1, 256, document_every=100), windows(128)


def tables_of(config: ModelConfig) -> tuple[int | None, ...]:
    """The value table of each layer."""
    return tuple(None if layer.attention is None else layer.attention.value_table for layer in config.layers)


def built(config: ModelConfig) -> GPT:
    return GPT(config, end_of_text=END_OF_TEXT)


@torch.no_grad()
def logits(model: GPT) -> Tensor:
    return model.logits(TOKENS, WINDOW)


@torch.no_grad()
def changed_by(model: GPT, name: str, index: int) -> bool:
    """Whether the logits depend on one learned scalar."""
    before = logits(model)
    scalar = dict(model.named_parameters())[name]
    scalar[index] += 0.25
    after = logits(model)
    scalar[index] -= 0.25
    return not torch.equal(before, after)


# ---- value path


@pytest.mark.parametrize("name", RECORDS)
def test_layers_look_up_the_records_tables(name: str) -> None:
    model = preset(name).model
    expected = plain.VALUE_TABLES[int(name[1:3])]
    assert list(tables_of(model)) == expected
    assert list(model.value_table_widths) == sorted({table for table in expected if table is not None})


@pytest.mark.parametrize("layers", [2, 4, 6, 16])
def test_maps_at_another_depth_are_resolved_from_both_ends(layers: int) -> None:
    base = replace(ModelConfig(num_layers=layers), value_ends=1)
    mirrored = tables_of(replace(base, value_path="mirrored"))
    assert mirrored == mirrored[::-1]
    assert mirrored[: layers // 2] == tuple(range(layers // 2))
    sparse = tables_of(replace(base, value_path="sparse"))
    assert sparse == (0, *(None,) * (layers - 2), 0)


@pytest.mark.parametrize("storage", ["tables", "chunks"])
@pytest.mark.parametrize(
    ("path", "missing", "map_of_layers"),
    [
        ("layerwise", (1,), (0, None, 2, 3)),
        ("layerwise", (-1,), (0, 1, 2, None)),
        ("mirrored", (1,), (0, None, 1, 0)),  # layer 2 still has the table that layer 1 shared with it
        ("mirrored", (0, 3), (None, 1, 1, None)),
        ("sparse", (0, 2), (None, 1, None, 1)),
        ("layerwise", (0, 1, 2, 3), (None,) * 4),
    ],
)
def test_a_value_table_exists_where_an_attention_asks_for_it_and_is_trained(
    path: str, missing: tuple[int, ...], map_of_layers: tuple[int | None, ...], storage: str
) -> None:
    every = ModelConfig(vocab_size=300, width=16, num_layers=4, num_heads=2, head_dim=8, value_path=path, value_ends=2,
                        value_storage=storage, rotary=RotaryConfig(max_tokens=256))  # type: ignore[arg-type]  # fmt: skip
    config = replace(every, layers_without_attention=missing)
    assert tables_of(config) == map_of_layers
    model = shaken(config)
    assert sum(p.numel() for p in model.parameters()) == describe(config).numel()
    model(TOKENS, TOKENS.roll(-1), WINDOW).main.mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert all(float(part.abs().max()) > 0 for part in parameter.grad.split(config.width, dim=-1)), name


def test_a_table_that_is_not_there_leaves_the_start_of_the_others_as_it_was() -> None:
    config = replace(small("r14-value-embed"), value_storage="tables")
    whole = dict(built(config).named_parameters())
    without = dict(built(replace(config, layers_without_attention=(3,))).named_parameters())
    gone = {name for name in whole if name.startswith("blocks.3.attention.")} | {"embeddings.values.3"}
    assert list(without) == [name for name in whole if name not in gone]
    assert all(torch.equal(parameter, whole[name]) for name, parameter in without.items())


@pytest.mark.parametrize("name", ["r14-value-embed", "r15-unet-values"])
def test_chunks_of_one_matrix_are_tables_under_another_name(name: str) -> None:
    """Records 15 and 16 are one function: the same values and the same gradients."""
    config = in_fp32(small(name))
    chunks, tables = shaken(config), built(replace(config, value_storage="tables"))
    state = dict(chunks.state_dict())
    wide = state.pop("embeddings.value_chunks")
    pieces = {f"embeddings.values.{i}": piece for i, piece in enumerate(wide.split(config.width, dim=1))}
    tables.load_state_dict(state | pieces)
    losses = [model(TOKENS, TOKENS, WINDOW).main for model in (chunks, tables)]
    assert torch.equal(*losses)
    for loss in losses:
        loss.mean().backward()
    separate = torch.cat([table.grad for table in tables.embeddings.values.values()], dim=1)
    assert_close(chunks.embeddings.value_chunks.grad, separate, rtol=1e-5, atol=1e-8)


def test_in_record_13_block_0_mixes_with_itself() -> None:
    model = shaken(in_fp32(small("r13-window-warmup")))
    assert not changed_by(model, "blocks.0.attention.value_mix", 0)
    assert changed_by(model, "blocks.1.attention.value_mix", 0)


def test_with_two_scalars_block_0_mixes_with_itself_too() -> None:
    """(λ0 + λ1) v, the sum that block 0 would get from its own values as `value_embed`."""
    model = shaken(in_fp32(replace(small("r13-window-warmup"), value_lambdas=2)))
    assert changed_by(model, "blocks.0.attention.value_mix", 1)


def test_a_row_of_a_mirrored_table_gets_the_gradients_of_both_its_layers() -> None:
    model = shaken(in_fp32(small("r16-block-mask")))

    def gradient(*cut_off: int) -> Tensor:
        """Of table 4, with the lookups of some layers cut off from it."""
        model.zero_grad()
        hooks = [
            model.blocks[layer].register_forward_pre_hook(lambda _, args: (*args[:2], args[2].detach(), *args[3:]))
            for layer in cut_off
        ]
        model(TOKENS, TOKENS, WINDOW).main.mean().backward()
        for hook in hooks:
            hook.remove()
        grad = model.embeddings.values["4"].grad
        assert grad is not None
        return grad

    assert_close(gradient(), gradient(4) + gradient(7), rtol=1e-4, atol=1e-7)


# ---- skips, x0, missing attention


@pytest.mark.parametrize("name", ["r17-sparse-values", "r18-softcap"])
def test_block_7_loses_its_attention_and_nothing_else(name: str) -> None:
    model = shaken(small(name))
    mine = {parameter.removeprefix("blocks.7.") for parameter, _ in model.named_parameters() if ".7." in parameter}
    assert mine == {"x0_mix", "mlp.up", "mlp.down"}
    assert model.blocks[7].attention is None
    assert sum(block.attention is not None for block in model.blocks) == 11
    assert changed_by(model, "blocks.7.x0_mix", 0)
    assert changed_by(model, "blocks.7.x0_mix", 1)
    assert changed_by(model, "skip_weights", 1), "the skip into block 7, from block 4"


def test_layers_without_attention_may_be_counted_from_the_end() -> None:
    config = replace(small("r18-softcap"), layers_without_attention=(-5,))
    assert [layer.index for layer in config.layers if layer.attention is None] == [7]
    same = replace(config, layers_without_attention=(7,))
    assert torch.equal(logits(shaken(config)), logits(shaken(same)))


def test_the_first_skip_adds_block_5_to_itself() -> None:
    """Seen at the blocks: what left block 5 enters block 6 twice, once with weight 0, and so on inwards to outwards."""
    model = shaken(in_fp32(small("r18-softcap")))
    entered: list[tuple[Any, ...]] = []
    left: list[Tensor] = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda _, args: entered.append(args))
        block.register_forward_hook(lambda _, args, out: left.append(out[0]))
    logits(model)
    for i in range(1, 12):
        assert torch.equal(entered[i][0], left[i - 1])
    assert [args[5] for args in entered[:6]] == [None] * 6
    for i in range(6):
        weight, stream = entered[6 + i][5]
        assert torch.equal(weight, model.skip_weights[i])
        assert torch.equal(stream, left[5 - i])
    x, *others, (weight, stream) = entered[6][:6]
    assert torch.equal(model.blocks[6](x + weight * stream, *others, None)[0], left[6])


# ---- norm, activation, cap and loss


def test_the_norm_works_in_fp32_with_the_epsilon_it_is_given() -> None:
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)) * 0.05
    for eps in (2.0**-7, 2.0**-23, 1e-6):
        expected = x.double() / torch.sqrt((x.double() ** 2).mean(-1, keepdim=True) + eps)
        assert_close(rms_norm(x, eps).double(), expected, rtol=1e-5, atol=0)
        low = x.bfloat16()
        exact = low.double() / torch.sqrt((low.double() ** 2).mean(-1, keepdim=True) + eps)
        assert rms_norm(low, eps).dtype == torch.bfloat16
        assert_close(rms_norm(low, eps).double(), exact, rtol=2**-8, atol=0)  # rounded once, to half a bf16 step


def test_the_activation_squares_what_is_positive() -> None:
    assert relu_squared(torch.tensor([-3.0, 0.0, 0.5, 2.0])).tolist() == [0.0, 0.0, 0.25, 4.0]


@pytest.mark.parametrize("cap", [15.0, 30.0])
def test_the_cap_bounds_logits_and_keeps_small_ones(cap: float) -> None:
    z = torch.tensor([-1e4, -40.0, -0.1, 0.0, 0.1, 20.0, 1e4])
    capped = cap_logits(z, cap)
    assert capped.tolist() == pytest.approx([cap * math.tanh(value / cap) for value in z.tolist()], abs=1e-5)
    assert float(capped.abs().max()) <= cap
    assert float(capped[4]) == pytest.approx(0.1, rel=1e-4)


def test_without_a_cap_logits_are_only_cast() -> None:
    z = torch.tensor([-1e4, 3.0]).bfloat16()
    assert cap_logits(z, None).tolist() == z.tolist()
    assert cap_logits(z, None).dtype == torch.float32
    assert cap_logits(z, 15.0).dtype == torch.float32


@pytest.mark.parametrize("name", ["r16-block-mask", "r18-softcap"])
def test_the_models_logits_stay_below_its_cap(name: str) -> None:
    config, cap = small(name), preset(name).model.softcap
    assert cap is not None
    model, free = shaken(config), shaken(replace(config, softcap=None))
    with torch.no_grad():
        model.head *= 5
        free.head *= 5
    assert float(logits(free).abs().max()) > cap
    assert float(logits(model).abs().max()) <= cap


def test_the_tied_head_is_the_token_table() -> None:
    model = shaken(small("r05-modern-arch"))
    assert "head" not in dict(model.named_parameters())
    before = logits(model)
    with torch.no_grad():
        model.embeddings.token[299] *= 2  # a token that does not occur in the input
    assert 299 not in TOKENS
    after = logits(model)
    assert torch.equal(before[..., :299], after[..., :299])
    assert_close(after[..., 299], 2 * before[..., 299], rtol=1e-5, atol=1e-5)


def test_a_token_sees_nothing_after_it_and_nothing_before_its_document() -> None:
    model = shaken(in_fp32(small("r18-softcap")))
    tokens = random_tokens(1, 256, document_every=10**6)
    tokens[0, 100] = END_OF_TEXT
    other = tokens.clone()
    other[0, 50] = tokens[0, 50] % 200 + 50 + 1
    other[0, 180] = tokens[0, 180] % 200 + 50 + 1
    with torch.no_grad():
        differs = (model.logits(tokens, WINDOW) != model.logits(other, WINDOW)).any(dim=-1)[0]
    assert differs.nonzero().flatten().tolist() == [*range(50, 100), *range(180, 256)]


# ---- parameters


GROUPS = ("embeddings", "value_embeddings", "lm_head", "matrices", "scalars")


@pytest.mark.parametrize("name", list(PRESETS))
def test_a_real_model_has_the_parameters_that_the_description_counts(name: str) -> None:
    config = scaled(preset(name), 1 / 16).model
    model, description = built(config), describe(config)
    assert sum(p.numel() for p in model.parameters()) == description.numel()
    for group, named in model.parameter_groups().items():
        assert sum(p.numel() for p in named.values()) == description.numel(group) > 0
        assert sum(p.nbytes for p in named.values()) == description.nbytes(group)


@pytest.mark.parametrize(
    ("name", "token", "values", "head", "blocks", "scalars", "total"),
    [
        ("r04-muon", 38_597_376, 0, 0, 84_934_656, 0, 123_532_032),
        ("r05-modern-arch", 38_633_472, 0, 0, 84_934_656, 0, 123_568_128),
        ("r13-window-warmup", 38_633_472, 0, 38_633_472, 84_934_656, 42, 162_201_642),
        ("r14-value-embed", 38_633_472, 463_601_664, 38_633_472, 84_934_656, 42, 625_803_306),
        ("r15-unet-values", 38_633_472, 231_800_832, 38_633_472, 84_934_656, 54, 394_002_486),
        ("r16-block-mask", 38_633_472, 231_800_832, 38_633_472, 84_934_656, 54, 394_002_486),
        ("r17-sparse-values", 38_597_376, 115_792_128, 38_633_472, 82_575_360, 52, 275_598_388),
        ("r18-softcap", 38_633_472, 115_900_416, 38_633_472, 82_575_360, 52, 275_742_772),
    ],
)
def test_full_size_presets_have_the_records_parameters(
    name: str, token: int, values: int, head: int, blocks: int, scalars: int, total: int
) -> None:
    description = describe(preset(name).model)
    assert tuple(description.numel(group) for group in GROUPS) == (token, values, head, blocks, scalars)
    assert description.numel() == total


@pytest.mark.parametrize("name", list(PRESETS))
def test_every_parameter_is_in_one_group(name: str) -> None:
    shrunk = {"demo": preset(name).model, "frontier-60": scaled(preset(name), 1 / 16).model}  # the others are narrowed
    model = built(shrunk.get(name) or small(name))
    groups = model.parameter_groups()
    assert set(groups) <= {*GROUPS, "vectors", "gates", "ngrams"}
    named = [parameter for group in groups.values() for parameter in group]
    assert sorted(named) == sorted(parameter for parameter, _ in model.named_parameters())
    assert all(p.dim() == 2 and n.startswith("blocks.") for n, p in groups["matrices"].items())
    learned = ["embeddings.position"] if model.config.positions == "learned" else []
    assert list(groups["embeddings"]) == ["embeddings.token", *learned]
    assert all(p.dim() == 2 and n.startswith("embeddings.value") for n, p in groups.get("value_embeddings", {}).items())
    assert all(p.dim() == 1 for p in groups.get("scalars", {}).values())
    assert list(groups.get("lm_head", {})) == ([] if model.config.tied_lm_head else ["head"])


def fused_parts(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    return {parameter.name: parameter.parts for parameter in describe(config).parameters if parameter.parts}


def test_only_a_fused_matrix_has_parts() -> None:
    assert fused_parts(small("r05-modern-arch")) == {}
    config = small("r04-muon")
    rows = (config.width,) * 3
    assert fused_parts(config) == {f"blocks.{layer}.attention.qkv": rows for layer in range(12)}
    grouped = replace(config, num_kv_heads=1)
    assert set(fused_parts(grouped).values()) == {(config.width, config.head_dim, config.head_dim)}
