"""One attention in several forms: dense, by chunks of queries, by block lists, with shared key heads. All agree."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from model.small import END_OF_TEXT, WINDOWED, in_fp32, random_tokens, shaken, small, windows
from paceline.kernels.attention import attend_chunked, attend_dense, attend_triangle
from paceline.model import attention
from paceline.model.attention import Attend, chunk_of, chunked_mask, plan_reference
from paceline.model.gpt import GPT
from paceline.model.masks import MaskRule, block_lists, dense_mask, document_ids, full_block_share
from paceline.recipes.demo import demo
from paceline.settings import backends as sizes
from paceline.settings.backends import reach_tokens
from paceline.settings.model import ModelConfig, RotaryConfig, WindowConfig

SCALE = 0.37


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def qkv(
    batch: int, tokens: int, *, heads: int = 2, kv_heads: int = 2, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    shapes = [(batch, tokens, count, 4) for count in (heads, kv_heads, kv_heads)]
    return [normal(*shape, seed=seed, dtype=dtype).requires_grad_() for seed, shape in enumerate(shapes)]


def by_formula(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """softmax(scale · q kᵀ) v, query head by query head; consecutive query heads share a key head."""
    group = q.size(2) // k.size(2)
    heads = []
    for head in range(q.size(2)):
        scores = torch.einsum("bqd,bkd->bqk", q[:, :, head], k[:, :, head // group]) * SCALE
        weights = scores.masked_fill(~mask, -math.inf).softmax(dim=-1)
        heads.append(weights @ v[:, :, head // group])
    return torch.stack(heads, dim=2)


def with_gradients(y: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    return [y, *torch.autograd.grad(y, inputs, normal(*y.shape, seed=9, dtype=y.dtype))]


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_dense_attention_is_the_formula_and_groups_share_key_heads(kv_heads: int) -> None:
    inputs = qkv(2, 96, heads=4, kv_heads=kv_heads)
    rule = MaskRule(by_document=True, window_in_tokens=True, window_in_blocks=False)
    documents = document_ids(random_tokens(2, 96, document_every=20), 7)
    mask = dense_mask(rule, documents, 96, torch.tensor(17))
    expected = with_gradients(by_formula(*inputs, mask), inputs)
    assert_close(with_gradients(attend_dense(*inputs, mask, scale=SCALE), inputs), expected, rtol=1e-9, atol=1e-9)


def test_without_a_mask_attention_is_causal() -> None:
    inputs = qkv(1, 50, heads=4, kv_heads=2)
    causal = torch.ones(1, 50, 50, dtype=torch.bool).tril()
    expected = with_gradients(by_formula(*inputs, causal), inputs)
    assert_close(with_gradients(attend_dense(*inputs, None, scale=SCALE), inputs), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("unit", ["tokens", "tokens_in_blocks", "blocks"])
@pytest.mark.parametrize("with_documents", [True, False])
def test_chunks_of_queries_give_the_dense_result_and_its_gradients(unit: str, with_documents: bool) -> None:
    tokens, window = 640, torch.tensor(200)
    config = ModelConfig(
        document_mask=with_documents,
        window=WindowConfig(unit=unit, start_tokens=128, growth_tokens=128, quantum_tokens=128),
    )
    rule = MaskRule.of(config)
    documents = document_ids(random_tokens(2, tokens, document_every=150), 7) if with_documents else None
    inputs = qkv(2, tokens, heads=4, kv_heads=2)
    mask = chunked_mask(rule, documents, tokens, window, reach=reach_tokens(config, tokens), chunk=chunk_of(tokens))
    dense = attend_dense(*inputs, dense_mask(rule, documents, tokens, window), scale=SCALE)
    chunked = attend_chunked(*inputs, mask, scale=SCALE)
    assert_close(with_gradients(chunked, inputs), with_gradients(dense, inputs), rtol=1e-9, atol=1e-9)


def spy_on_chunks(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The mask shapes of every call of the chunked twin from now on."""
    shapes: list[torch.Size] = []

    def spy(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, *, scale: float) -> Tensor:
        shapes.append(mask.shape)
        return attend_chunked(q, k, v, mask, scale=scale)

    monkeypatch.setattr(attention, "attend_chunked", spy)
    return shapes


def attended(attend: Attend, config: ModelConfig, inputs: list[Tensor]) -> Tensor:
    q, k, v = inputs
    return attend(config.layers[0], q, k, v)


@pytest.mark.parametrize("rows", [1, 96, 128, 256, 512])  # ragged, even, all at once, more than there are
def test_a_triangle_of_queries_gives_the_dense_result_and_its_gradients(rows: int) -> None:
    tokens, rule = 256, MaskRule(by_document=True, window_in_tokens=True, window_in_blocks=False)
    documents = document_ids(random_tokens(2, tokens), END_OF_TEXT)
    mask = dense_mask(rule, documents, tokens, torch.tensor(100))
    generator = torch.Generator().manual_seed(0)
    qkv = [torch.randn(2, tokens, heads, 8, generator=generator, requires_grad=True) for heads in (4, 2, 2)]
    results = []
    for attended in (attend_dense(*qkv, mask, scale=0.3), attend_triangle(*qkv, mask, scale=0.3, rows=rows)):
        results.append([attended, *torch.autograd.grad(attended.square().sum(), qkv)])
    assert_close(*results, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("tokens", "chunked"), [(4096, False), (4608, True), (4736, True)])  # 36 and 37 blocks
def test_past_4096_tokens_the_reference_works_by_chunks(
    tokens: int, chunked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, window = small("r18-softcap"), windows(13 * 128)
    documents = document_ids(random_tokens(1, tokens, document_every=2000), 7)
    inputs = qkv(1, tokens, heads=1, kv_heads=1, dtype=torch.float32)
    shapes = spy_on_chunks(monkeypatch)
    y = attended(plan_reference(config, documents, tokens, window), config, inputs)
    assert bool(shapes) == chunked
    if chunked:
        chunk = 512 if tokens % 512 == 0 else 128
        assert shapes == [(1, tokens // chunk, chunk, 1792 + chunk)], "memory follows the reach, not the length"
    mask = dense_mask(MaskRule.of(config), documents, tokens, window[0])
    assert_close(y, attend_dense(*inputs, mask, scale=config.head_dim**-0.5), rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("name", WINDOWED)
def test_a_whole_model_is_the_same_by_chunks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small(name)
    config = replace(config, window=replace(config.window, growth_tokens=192))
    model, tokens, window = shaken(in_fp32(config)), random_tokens(1, 640, document_every=300), windows(256)
    dense = model.logits(tokens, window)
    shapes = spy_on_chunks(monkeypatch)
    monkeypatch.setattr(sizes, "DENSE_LIMIT_TOKENS", 512)
    monkeypatch.setattr(sizes, "CHUNK_TOKENS", 128)
    chunked = model.logits(tokens, window)
    assert len(shapes) == len(config.attending)
    assert_close(chunked, dense, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_model_with_shared_key_heads_is_one_with_repeated_key_heads() -> None:
    """Key and value matrices and value tables of two heads, each repeated for the three query heads of its group."""
    full = in_fp32(small("r18-softcap"))
    grouped, whole = shaken(replace(full, num_kv_heads=2)), GPT(full, end_of_text=7)
    state = dict(grouped.state_dict())
    for name, weight in state.items():
        if name.endswith(("attention.key", "attention.value")):
            state[name] = weight.unflatten(0, (2, -1)).repeat_interleave(3, dim=0).flatten(0, 1)
        elif name.startswith("embeddings.values."):
            state[name] = weight.unflatten(1, (2, -1)).repeat_interleave(3, dim=1).flatten(1, 2)
    whole.load_state_dict(state)
    tokens, window = random_tokens(2, 256), windows(128)
    assert_close(grouped.logits(tokens, window), whole.logits(tokens, window), rtol=1e-5, atol=1e-5)


def compiled(config: ModelConfig) -> tuple[GPT, object]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = shaken(config)
    return model, torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=False)


@pytest.mark.parametrize("path", [pytest.param("dense", marks=pytest.mark.slow), "chunked"])
def test_a_whole_window_schedule_compiles_once(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The window is a tensor: every value of the schedule runs through one graph, and each gives its own result."""
    if path == "chunked":
        monkeypatch.setattr(sizes, "DENSE_LIMIT_TOKENS", 128)
    config = replace(demo().model, width=16, num_heads=2, head_dim=8, vocab_size=64, num_layers=2)
    config = replace(config, rotary=RotaryConfig(max_tokens=1024))
    model, fast = compiled(config)
    tokens = random_tokens(1, 1024, vocab_size=64, document_every=700)
    losses = []
    for step in range(5):
        window = windows(config.window.tokens_at(step, 4))
        loss = fast(tokens, tokens, window).main
        loss.sum().backward()
        assert_close(loss, model(tokens, tokens, window).main, rtol=1e-4, atol=1e-5)
        losses.append(loss.detach())
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]
    distinct = {int(config.window.tokens_at(step, 4)) for step in range(5)}
    assert len(distinct) == 4
    assert len({float(loss.sum()) for loss in losses}) == 4


@torch.no_grad()
def test_a_wider_window_leaves_what_it_does_not_reach_bit_for_bit() -> None:
    """Only queries for which the mask changes may change: those of the first block see all of it under any window."""
    model, tokens = shaken(in_fp32(small("r18-softcap"))), random_tokens(1, 512, document_every=10**6)
    narrow, wide = (model.logits(tokens, windows(window)) for window in (128, 256))
    assert torch.equal(narrow[:, :128], wide[:, :128])
    assert not torch.equal(narrow[:, 128:256], wide[:, 128:256])


def test_full_blocks_dominate_only_in_wide_windows_and_long_documents() -> None:
    rule, documents = MaskRule.of(small("r18-softcap")), torch.zeros(1, 4096, dtype=torch.int32)
    shares = [float(full_block_share(block_lists(rule, documents, 4096, torch.tensor(n * 128)))) for n in range(1, 15)]
    assert shares == sorted(shares)
    assert shares[0] == 0.0
    assert shares[-1] < 13 / 14
