"""The steady step is the step of `Decoder.feed` and `choose`, in one shape for all texts."""

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from model.lively import WINDOWS, lively, small
from paceline.evaluate.config import SamplingConfig
from paceline.evaluate.decode import Decoder, logits_without_cache
from paceline.evaluate.draw import choose
from paceline.evaluate.generate import Writing, _one_by_one, _steadily
from paceline.evaluate.prepare import prepared
from paceline.evaluate.steady import Steady
from paceline.kernels.attention import attend_dense, attend_one
from paceline.model.gpt import GPT
from paceline.model.linear import linear, row_product
from paceline.recipes.presets import PRESETS
from paceline.recipes.scaling import scaled

GREEDY = SamplingConfig(temperature=0.0)
KINDS = [GREEDY, SamplingConfig(seed=3), SamplingConfig(top_k=None, seed=4), SamplingConfig(top_k=None, top_p=0.9)]


def writing(config: SamplingConfig) -> Writing:
    return Writing(config, random.Random(config.seed))


def tokens_like(length: int, seed: int) -> Tensor:
    """(1, length); 0s open documents."""
    return torch.randint(0, 61, (1, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "unit", [pytest.param(unit, marks=() if unit in ("tokens", "blocks") else pytest.mark.slow) for unit in WINDOWS]
)
def test_slots_of_all_lengths_go_on_as_each_would_alone(unit: str) -> None:
    """One is empty, one at its first tokens, one before and one past its ring's end; one of them stands still for a
    while and one is given to another text."""
    model = small(unit)
    prompts = {slot: tokens_like(length, slot) for slot, length in {1: 1, 2: 380, 3: 600, 4: 90}.items()}
    decoder = Decoder(model, window=128, max_tokens=800, slots=5)
    steady = Steady(decoder)
    seen: dict[int, list[int]] = {}

    def begin(slot: int, prompt: Tensor) -> None:
        token = int(decoder.feed(prompt, first=slot)[0, :61].argmax())
        steady.begin(slot, token)
        seen[slot] = [*prompt[0].tolist(), token]

    def go_on(slots: set[int], steps: int) -> None:
        for _ in range(steps):
            ids = steady.launch([writing(GREEDY) if slot in slots else None for slot in range(5)]).wait()
            for slot in slots:
                seen[slot].append(ids[slot])

    for slot, prompt in prompts.items():
        begin(slot, prompt)
    go_on({1, 2, 3, 4}, 10)
    go_on({1, 2, 4}, 3)
    decoder.free(4)
    begin(4, tokens_like(300, seed=9))
    go_on({1, 3, 4}, 5)
    for slot, tokens in seen.items():
        logits = logits_without_cache(model, torch.tensor([tokens[:-1]]), window=128)[0, :61]
        assert int(logits.argmax()) == tokens[-1]
        if slot in {1, 3, 4}:  # those of the last step
            torch.testing.assert_close(steady.logits[slot], logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_writes_the_same_as_step_by_step(name: str) -> None:
    """Also prepared, where q, k and v are one matrix."""
    config = scaled(PRESETS[name](), 1 / 16).model
    model = lively(GPT(replace(config, precision=config.precision.computing_in("fp32")), end_of_text=0))
    prompt = torch.randint(1, 500, (140,), generator=torch.Generator().manual_seed(4)).tolist()
    plain = list(_one_by_one(model, prompt, writing(GREEDY), 128, 8, True))
    assert list(_steadily(model, prompt, writing(GREEDY), 128, 8)) == plain


@pytest.mark.parametrize("config", KINDS, ids=["greedy", "few", "all", "sorted"])
def test_draws_are_those_of_the_definition(config: SamplingConfig) -> None:
    model = small("blocks")
    plain = list(_one_by_one(model, [0, 5], writing(config), 128, 60, True))
    assert list(_steadily(model, [0, 5], writing(config), 128, 60)) == plain


def test_texts_of_all_kinds_share_a_step() -> None:
    model = small("blocks")
    decoder = Decoder(model, window=128, max_tokens=200, slots=4)
    steady, texts = Steady(decoder), [writing(config) for config in KINDS]
    first = []
    for slot, text in enumerate(texts):
        logits = decoder.feed(torch.tensor([[0, 5, 6 + slot]]), first=slot)
        first.append(choose(logits[0, :61], text.sampling, text.generator))
        steady.begin(slot, first[-1])
    steps = [steady.launch(texts).wait() for _ in range(30)]
    for slot, config in enumerate(KINDS):
        alone = list(_one_by_one(model, [0, 5, 6 + slot], writing(config), 128, 31, True))
        assert [first[slot], *(ids[slot] for ids in steps)] == alone


@pytest.mark.parametrize("slots", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_step_is_one_graph_for_the_compiler(slots: int) -> None:
    """With the sums of products that only compiled code should use, here run as they are."""
    model = small("blocks")
    decoder = Decoder(prepared(model, compiled=True), window=128, max_tokens=200, slots=slots)
    steady = Steady(decoder)
    steady.attend_over = attend_one
    steady.following = torch.compile(steady._following, fullgraph=True, dynamic=False, backend="eager")
    decoder.feed(torch.tensor([[0, 5, 6]] * slots))
    for slot in range(slots):
        steady.begin(slot, 7)
    steps = [steady.launch([writing(GREEDY)] * slots).wait()[-1] for _ in range(10)]
    assert steps == list(_one_by_one(model, [0, 5, 6, 7], writing(GREEDY), 128, 10, True))


def test_attention_of_one_query_equals_the_dense_one() -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(3, 1, 4, 8, generator=generator)
    k, v = (torch.randn(3, 50, 2, 8, generator=generator) for _ in range(2))
    mask = torch.rand(3, 1, 50, generator=generator) < 0.5
    torch.testing.assert_close(attend_one(q, k, v, mask, scale=0.3), attend_dense(q, k, v, mask, scale=0.3))


@pytest.mark.parametrize("rows", [1, 2])
def test_a_row_product_is_the_linear_one(rows: int) -> None:
    generator, precision = torch.Generator().manual_seed(0), small("none").config.precision
    x, weight = torch.randn(1, rows, 16, generator=generator), torch.randn(24, 16, generator=generator)
    torch.testing.assert_close(row_product(x, weight, precision), linear(x, weight, precision))


def test_a_prepared_model_shares_its_tables_and_leaves_the_original_as_it_was() -> None:
    model = small("blocks")
    before = {name: (tensor.data_ptr(), tensor.dtype) for name, tensor in model.named_parameters()}
    model_in_bf16 = prepared(small("blocks", precision=model.config.precision.computing_in("bf16")))
    lean = prepared(model)
    assert lean.embeddings.token is model.embeddings.token
    assert {name: (tensor.data_ptr(), tensor.dtype) for name, tensor in model.named_parameters()} == before
    assert {tensor.dtype for tensor in model_in_bf16.parameter_classes()["matrices"].values()} == {torch.bfloat16}
    assert {tensor.dtype for tensor in model_in_bf16.parameter_classes()["scalars"].values()} == {torch.float32}
