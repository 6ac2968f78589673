"""The step of a decode graph is the step of `Decoder.feed` and `choose`, in one shape for all texts."""

import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from model.lively import (
    LAYERS_OF_MANY_SHAPES,
    PREVIOUS_TOKENS,
    WINDOWS,
    lively,
    logits_without_cache,
    small,
    windows_of,
)
from paceline.core.probe import bf16_products, compiler
from paceline.evaluate import decode_graph
from paceline.evaluate.config import SamplingConfig
from paceline.evaluate.decode import Decoder, Place, plan_plainly
from paceline.evaluate.decode_graph import DecodeGraph, plan_cells
from paceline.evaluate.generate import _by_decode_graph, _one_by_one
from paceline.evaluate.inference_model import prepared, row_product
from paceline.evaluate.sampling import Writing, choose
from paceline.model.gpt import GPT
from paceline.model.ops import linear, rms_norm
from paceline.recipes.presets import PRESETS
from paceline.recipes.scaling import scaled
from paceline.settings.model import PrecisionConfig

GREEDY = SamplingConfig(temperature=0.0)
KINDS = [GREEDY, SamplingConfig(seed=3), SamplingConfig(top_k=None, seed=4), SamplingConfig(top_k=None, top_p=0.9)]


def test_preparing_a_copy_leaves_the_model_as_it_is() -> None:
    model = small("blocks")
    before = {name: (p.dtype, p.requires_grad, p.clone()) for name, p in model.named_parameters()}
    prepared(model)
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    for name, (dtype, learns, value) in before.items():
        assert (after[name].dtype, after[name].requires_grad) == (dtype, learns)
        assert torch.equal(after[name], value)


def test_a_copy_keeps_in_bf16_what_its_products_read_and_nothing_else() -> None:
    """Gates are read in fp32: in another format the copy could not run."""
    model = small("blocks", **PREVIOUS_TOKENS, precision=PrecisionConfig(compute="bf16", scalars="bf16"))
    copy = dict(prepared(model).named_parameters())
    cast = {name for name, p in copy.items() if p.dtype == torch.bfloat16 and p.dim() == 2}
    ends = {name.rpartition(".")[2] for name in cast}
    assert ends == {"qkv", "output", "up", "down", "head"}
    assert copy["blocks.0.attention.value_gate"].dtype == torch.float32
    if bf16_products("cpu").usable:
        tokens = tokens_like(40, seed=1)
        found, expected = (
            Decoder(one, windows=(128, 384), max_tokens=60).feed(tokens) for one in (prepared(model), model)
        )
        torch.testing.assert_close(found, expected, rtol=2**-7, atol=2**-5)


def tokens_like(length: int, seed: int) -> Tensor:
    """(1, length); 0s open documents."""
    return torch.randint(0, 61, (1, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("unit", "changes"),
    [
        *(pytest.param(unit, {}, marks=() if unit in ("tokens", "blocks") else pytest.mark.slow) for unit in WINDOWS),
        pytest.param("blocks", PREVIOUS_TOKENS, id="previous tokens"),
    ],
)
def test_slots_of_all_lengths_go_on_as_each_would_alone(unit: str, changes: dict[str, Any]) -> None:
    """One is empty, one at its first tokens, one before and one past its ring's end; one of them stands still for a
    while and one is given to another text."""
    model = small(unit, **changes)
    prompts = {slot: tokens_like(length, slot) for slot, length in {1: 1, 2: 380, 3: 600, 4: 90}.items()}
    decoder = Decoder(model, windows=windows_of(model, 128), max_tokens=800, slots=5)
    graph = DecodeGraph(decoder)
    seen: dict[int, list[int]] = {}

    def begin(slot: int, prompt: Tensor) -> None:
        token = int(decoder.feed(prompt, first=slot)[0, :61].argmax())
        graph.begin(slot, token)
        seen[slot] = [*prompt[0].tolist(), token]

    def go_on(slots: set[int], steps: int) -> None:
        for _ in range(steps):
            ids = graph.launch([Writing(GREEDY) if slot in slots else None for slot in range(5)]).wait()
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
        logits = logits_without_cache(model, torch.tensor([tokens[:-1]]), windows=windows_of(model, 128))[0, :61]
        assert int(logits.argmax()) == tokens[-1]
        if slot in {1, 3, 4}:  # those of the last step
            torch.testing.assert_close(graph.logits[slot], logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_writes_the_same_as_step_by_step(name: str) -> None:
    """Also prepared, where q, k and v are one matrix."""
    config = scaled(PRESETS[name](), 1 / 16).model
    model = lively(GPT(replace(config, precision=replace(config.precision, compute="fp32")), end_of_text=0))
    prompt = torch.randint(1, 500, (140,), generator=torch.Generator().manual_seed(4)).tolist()
    plain = list(_one_by_one(model, prompt, Writing(GREEDY), windows_of(model, 128), 8))
    assert list(_by_decode_graph(model, prompt, Writing(GREEDY), windows_of(model, 128), 8)) == plain


@pytest.mark.parametrize("changes", [LAYERS_OF_MANY_SHAPES, PREVIOUS_TOKENS], ids=["shapes", "previous tokens"])
def test_layers_of_many_kinds_with_two_windows_write_the_same_as_step_by_step(changes: dict[str, Any]) -> None:
    model, prompt = small("blocks", **changes), tokens_like(500, seed=1)[0].tolist()
    plain = list(_one_by_one(model, prompt, Writing(GREEDY), (128, 384), 20))
    assert list(_by_decode_graph(model, prompt, Writing(GREEDY), (128, 384), 20)) == plain


@pytest.mark.parametrize("changes", [{}, LAYERS_OF_MANY_SHAPES, PREVIOUS_TOKENS], ids=["plain", "shapes", "previous"])
def test_a_step_takes_no_numbers_from_the_host_and_gives_none(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU twin of a capture, in which a GPU allows neither."""
    model = small("blocks", **changes)
    graph = DecodeGraph(Decoder(prepared(model), windows=(128, 384)[: len(model.config.windows)], max_tokens=200))

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a copy between host and device")

    for place, name in ((torch, "tensor"), (torch, "as_tensor"), (Tensor, "item"), (Tensor, "tolist")):
        monkeypatch.setattr(place, name, refuse)
    graph.replay()


@pytest.mark.parametrize("config", KINDS, ids=["greedy", "few", "all", "sorted"])
def test_draws_are_those_of_the_definition(config: SamplingConfig) -> None:
    model = small("blocks")
    plain = list(_one_by_one(model, [0, 5], Writing(config), windows_of(model, 128), 60))
    assert list(_by_decode_graph(model, [0, 5], Writing(config), windows_of(model, 128), 60)) == plain


def test_texts_of_all_kinds_share_a_step() -> None:
    model = small("blocks")
    decoder = Decoder(model, windows=windows_of(model, 128), max_tokens=200, slots=4)
    graph, texts = DecodeGraph(decoder), [Writing(config) for config in KINDS]
    first = []
    for slot, text in enumerate(texts):
        logits = decoder.feed(torch.tensor([[0, 5, 6 + slot]]), first=slot)
        first.append(choose(logits[0, :61], text.sampling, text.generator))
        graph.begin(slot, first[-1])
    steps = [graph.launch(texts).wait() for _ in range(30)]
    for slot, config in enumerate(KINDS):
        alone = list(_one_by_one(model, [0, 5, 6 + slot], Writing(config), windows_of(model, 128), 31))
        assert [first[slot], *(ids[slot] for ids in steps)] == alone


@torch.library.custom_op("paceline_tests::attend_cells", mutates_args=("keys", "values"))
def stand_in(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scale: float) -> Tensor:
    """What the kernel of the same name does, on a CPU."""
    slots, _, cells = (seen == 2).nonzero(as_tuple=True)
    place = Place(0, (slots * seen.size(2) + cells)[:, None], seen > 0)
    return plan_plainly(place, scale)(q, k, v, keys, values).contiguous()


@stand_in.register_fake
def _(q: Tensor, *others: Tensor | float) -> Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


def compiled_graph(decoder: Decoder, monkeypatch: pytest.MonkeyPatch, *, backend: str) -> DecodeGraph:
    """As on a GPU, with the operator of that signature."""
    kernels = pytest.importorskip("paceline.kernels.attention_decode")
    monkeypatch.setattr(kernels, "attend_cells", stand_in)
    monkeypatch.setattr(decode_graph, "plan_for", lambda _: plan_cells)
    compile_plainly = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *given, **named: compile_plainly(*given, **named, backend=backend))
    return DecodeGraph(decoder, compiled=True)


def check_greedy(graph: DecodeGraph, model: GPT) -> None:
    slots = len(graph.decoder.lengths)
    graph.decoder.feed(torch.tensor([[0, 5, 6]] * slots))
    for slot in range(slots):
        graph.begin(slot, 7)
    steps = [graph.launch([Writing(GREEDY)] * slots).wait()[-1] for _ in range(10)]
    assert steps == list(_one_by_one(model, [0, 5, 6, 7], Writing(GREEDY), windows_of(model, 128), 10))


@pytest.mark.parametrize("slots", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_step_is_one_graph_for_the_compiler(slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small("blocks")
    decoder = Decoder(prepared(model), windows=windows_of(model, 128), max_tokens=200, slots=slots)
    graph = compiled_graph(decoder, monkeypatch, backend="aot_eager")
    assert graph.compiled
    check_greedy(graph, model)


@pytest.mark.slow
def test_compiled_code_copies_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that it allocates is as large as one."""
    if not compiler("cpu").usable:
        pytest.skip("torch.compile cannot be used here")
    model = small("blocks")
    decoder = Decoder(prepared(model), windows=windows_of(model, 128), max_tokens=200, slots=2)
    graph, (code,) = run_and_get_code(compiled_graph, decoder, monkeypatch, backend="inductor")
    assert code.count("paceline_tests.attend_cells") >= len(decoder.keys)
    shapes = re.findall(r"empty_strided_cpu\(\(([\d, ]+)\)", code)
    sizes = [math.prod(int(size) for size in shape.split(",") if size.strip()) for shape in shapes]
    assert max(sizes) < decoder.keys[0].numel()
    check_greedy(graph, model)


def test_a_compiler_that_fails_is_told_of_and_done_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> None:
        raise RuntimeError("ptxas is missing\nand much more")

    model = small("blocks")
    decoder = Decoder(prepared(model), windows=windows_of(model, 128), max_tokens=200)
    graph = compiled_graph(decoder, monkeypatch, backend=broken)
    (said,) = (record.getMessage() for record in caplog.records if record.name == "paceline.evaluate.decode_graph")
    assert said == "the step is not compiled: backend='broken' raised: RuntimeError: ptxas is missing"
    assert not graph.compiled
    check_greedy(graph, model)


def test_a_row_product_is_the_linear_one_of_the_row_or_its_norm() -> None:
    generator, dtype = torch.Generator().manual_seed(0), torch.float32
    x, weight = torch.randn(1, 1, 16, generator=generator), torch.randn(24, 16, generator=generator)
    torch.testing.assert_close(row_product(x, weight, dtype=dtype), linear(x, weight, dtype))
    normed = linear(rms_norm(x, 0.1), weight, dtype)
    torch.testing.assert_close(row_product(x, weight, dtype=dtype, norm_eps=0.1), normed)


def test_a_prepared_model_shares_its_tables_and_leaves_the_original_as_it_was() -> None:
    model = small("blocks")
    before = {name: (tensor.data_ptr(), tensor.dtype) for name, tensor in model.named_parameters()}
    model_in_bf16 = prepared(small("blocks", precision=replace(model.config.precision, compute="bf16")))
    lean = prepared(model)
    assert lean.embeddings.token is model.embeddings.token
    assert {name: (tensor.data_ptr(), tensor.dtype) for name, tensor in model.named_parameters()} == before
    assert {tensor.dtype for tensor in model_in_bf16.parameter_groups()["matrices"].values()} == {torch.bfloat16}
    assert {tensor.dtype for tensor in model_in_bf16.parameter_groups()["scalars"].values()} == {torch.float32}
