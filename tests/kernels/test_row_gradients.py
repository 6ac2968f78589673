"""Row gradients of a table against the dense gradient of F.embedding, and their sums against float64."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from model.small import in_fp32, random_tokens, shaken, small, windows
from paceline.kernels.row_gradients import RowGradients, append_rows, coalesced, look_up_rows
from paceline.model.gpt import GPT

ROWS, WIDTH = 40, 6


def sample(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens (token 0 very often, the last rows never), a table, and gradients of what is looked up."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, ROWS - 5, shape, generator=generator)
    tokens[torch.rand(shape, generator=generator) < 0.3] = 0
    table = torch.randn(ROWS, WIDTH, generator=generator).to(dtype).requires_grad_()
    return tokens, table, torch.randn(*shape, WIDTH, generator=generator).to(dtype)


def exact_sums(tokens: Tensor, grad: Tensor) -> Tensor:
    """(ROWS, WIDTH): in float64, token by token."""
    exact = torch.zeros(ROWS, WIDTH, dtype=torch.float64)
    return exact.index_add_(0, tokens.flatten().long(), grad.flatten(0, -2).double())


def dense(ids: Tensor, sums: Tensor) -> Tensor:
    """Sums at their rows, which one index may name more than once with the same sum."""
    found = torch.zeros(ROWS, sums.size(1), dtype=sums.dtype)
    found[ids] = sums
    return found


@pytest.mark.parametrize("shape", [(1,), (7,), (3, 129), (2, 1000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_and_gradient_are_those_of_the_plain_twin(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tokens, table, grad = sample(shape, dtype)
    store = RowGradients(tokens.numel(), WIDTH, dtype)
    found = look_up_rows(tokens, table, store)
    assert torch.equal(found, F.embedding(tokens, table))
    found.backward(grad)
    assert table.grad is None, "nothing of the table's own size is made"
    ids, sums = coalesced(*store.gathered())
    assert sums.dtype == torch.float32
    torch.testing.assert_close(dense(ids, sums).double(), exact_sums(tokens, grad), rtol=1e-6, atol=1e-5)  # fp32 sums
    twin = table.detach().float().requires_grad_()  # in bf16 the twin would round every addition
    F.embedding(tokens, twin).backward(grad.float())
    torch.testing.assert_close(dense(ids, sums), twin.grad, rtol=1e-5, atol=1e-5)


def test_micro_batches_add_up() -> None:
    """Three of different sizes in one store give what one look-up of all their tokens gives, to the bit."""
    tokens, table, grad = sample((60,))
    whole, parts = (RowGradients(80, WIDTH, torch.float32) for _ in range(2))
    look_up_rows(tokens, table, whole).backward(grad)
    for piece in (slice(0, 10), slice(10, 45), slice(45, 60)):
        look_up_rows(tokens[piece], table, parts).backward(grad[piece])
    assert int(parts.count) == int(whole.count) == 60
    for mine, theirs in zip(coalesced(*parts.gathered()), coalesced(*whole.gathered()), strict=True):
        assert torch.equal(mine, theirs)


def test_two_tables_and_two_look_ups_of_one_table_do_not_mix() -> None:
    (tokens, table, grad), (others, second, _) = sample((20,)), sample((20,), seed=1)
    stores = [RowGradients(40, WIDTH, torch.float32) for _ in range(2)]
    y = look_up_rows(tokens, table, stores[0]) + look_up_rows(others, table, stores[0])
    (y + look_up_rows(others, second, stores[1])).backward(grad)
    expected = exact_sums(tokens, grad) + exact_sums(others, grad)
    found = [dense(*coalesced(*store.gathered())).double() for store in stores]
    torch.testing.assert_close(found[0], expected, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(found[1], exact_sums(others, grad), rtol=1e-6, atol=1e-5)


def test_without_a_backward_pass_a_look_up_leaves_nothing() -> None:
    tokens, table, _ = sample((20,))
    store = RowGradients(20, WIDTH, torch.float32)
    with torch.no_grad():
        look_up_rows(tokens, table, store)
    look_up_rows(tokens, table, store)
    assert int(store.count) == 0


def test_places_that_no_token_took_touch_no_further_row() -> None:
    tokens, table, grad = sample((7,))
    store = RowGradients(50, WIDTH, torch.float32)
    look_up_rows(tokens, table, store).backward(grad)
    store.ids[7:] = 39  # what an earlier, fuller step has left there
    ids, rows = store.gathered()
    assert ids[:7].tolist() == tokens.tolist()
    assert set(ids[7:].tolist()) == {-1}
    assert not rows[7:].any()
    found, sums = coalesced(ids, rows)
    assert set(found.tolist()) == set(tokens.tolist())
    torch.testing.assert_close(dense(found, sums).double(), exact_sums(tokens, grad), rtol=1e-6, atol=1e-6)


def test_a_cleared_store_holds_the_next_step_only() -> None:
    store = RowGradients(30, WIDTH, torch.float32)
    (tokens, table, grad), (others, _, after) = sample((30,)), sample((12,), seed=1)
    look_up_rows(tokens, table, store).backward(grad)
    store.clear()
    assert int(store.count) == 0
    look_up_rows(others, table, store).backward(after)
    found = dense(*coalesced(*store.gathered())).double()
    torch.testing.assert_close(found, exact_sums(others, after), rtol=1e-6, atol=1e-6)


@settings(max_examples=60)
@given(st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=50), st.integers(0, 2**31))
def test_sums_by_index_are_exact_and_distinct_indices_come_first(ids: list[int], seed: int) -> None:
    """Whole numbers, so that every order of addition gives the same."""
    tokens = torch.tensor(ids)
    rows = torch.randint(-9, 10, (len(ids), WIDTH), generator=torch.Generator().manual_seed(seed)).float()
    found, sums = coalesced(tokens, rows)
    assert (found.shape, sums.shape) == (tokens.shape, rows.shape)
    distinct = sorted(set(ids))
    assert found[: len(distinct)].tolist() == distinct
    assert set(found[len(distinct) :].tolist()) <= {distinct[-1]}
    expected = exact_sums(tokens, rows)
    assert torch.equal(sums.double(), expected[found]), "repetitions have the same sum"


def test_sums_have_the_same_bits_every_time_and_are_added_in_the_order_of_tokens() -> None:
    tokens, _, grad = sample((3000,))
    first = coalesced(tokens, grad)
    for _ in range(3):
        assert all(map(torch.equal, coalesced(tokens, grad), first))
    one_by_one = torch.zeros(ROWS, WIDTH)
    for token, row in zip(tokens.tolist(), grad, strict=True):
        one_by_one[token] += row
    assert torch.equal(dense(*first), one_by_one)


def test_bf16_rows_are_added_up_in_fp32() -> None:
    """In bf16, 256 + 1 is 256."""
    rows = torch.ones(300, 2, dtype=torch.bfloat16)
    _, sums = coalesced(torch.zeros(300, dtype=torch.int64), rows)
    assert sums[0].tolist() == [300.0, 300.0]


def test_more_tokens_than_places_are_an_error() -> None:
    tokens, table, grad = sample((20,))
    store = RowGradients(19, WIDTH, torch.float32)
    with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)"):
        look_up_rows(tokens, table, store).backward(grad)


def test_the_operator_writes_what_it_says_and_nothing_else() -> None:
    tokens, _, grad = sample((9,))
    buffers = (torch.zeros(20, dtype=torch.int64), torch.zeros(20, WIDTH), torch.zeros((), dtype=torch.int64))
    torch.library.opcheck(append_rows, (grad, tokens, *buffers), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_code_keeps_rows_through_one_graph(backend: str) -> None:
    """Two micro-batches and two steps, without a graph break and without compiling again."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    store = RowGradients(60, WIDTH, torch.float32)

    def looked_up(tokens: Tensor, table: Tensor) -> Tensor:
        return torch.sin(2 * look_up_rows(tokens, table, store))

    compiled = torch.compile(looked_up, backend=backend, fullgraph=True, dynamic=False)
    for step in range(2):
        store.clear()
        expected = torch.zeros(ROWS, WIDTH)
        for micro in range(2):
            tokens, table, grad = sample((3, 10), seed=2 * step + micro)
            compiled(tokens, table).backward(grad)
            assert table.grad is None
            torch.sin(2 * F.embedding(tokens, table)).backward(grad)
            assert table.grad is not None
            expected += table.grad
        found = dense(*coalesced(*store.gathered()))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


TABLES = ("embeddings.token", "embeddings.values.0", "embeddings.values.1")


def with_row_gradients(model: GPT, tokens: int) -> dict[str, RowGradients]:
    params = dict(model.named_parameters())
    stores = {name: RowGradients(tokens, params[name].size(1), params[name].dtype) for name in TABLES}
    for name, store in stores.items():
        model.keep_row_gradients(name, store)
    return stores


@pytest.mark.parametrize("compiled", [False, True])
def test_the_tables_of_a_model_get_the_gradients_they_would_have_densely(compiled: bool) -> None:
    """A value table that two layers use is looked up once; table 2 keeps its dense gradient beside the others."""
    torch._dynamo.reset()
    config = replace(in_fp32(small("r18-softcap")), num_layers=6, layers_without_attention=())
    plain, by_rows, tokens = shaken(config), shaken(config), random_tokens(2, 128)
    stores = with_row_gradients(by_rows, tokens.numel())
    targets = tokens.roll(-1, dims=1)
    forward = torch.compile(by_rows, backend="aot_eager", fullgraph=True, dynamic=False) if compiled else by_rows
    losses = [run(tokens, targets, windows(128)).main for run in (plain, forward)]
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-5)
    for loss in losses:
        loss.mean().backward()
    for (name, expected), found in zip(plain.named_parameters(), by_rows.parameters(), strict=True):
        assert expected.grad is not None
        size = float(expected.grad.abs().max())
        if name not in stores:
            assert found.grad is not None
            torch.testing.assert_close(found.grad, expected.grad, rtol=1e-4, atol=1e-5 * size)
            continue
        assert found.grad is None
        assert int(stores[name].count) == tokens.numel()
        sums = torch.zeros_like(expected.grad)
        ids, rows = coalesced(*stores[name].gathered())
        sums[ids] = rows
        torch.testing.assert_close(sums, expected.grad, rtol=1e-4, atol=1e-5 * size)


def test_a_store_is_no_part_of_what_a_model_saves() -> None:
    model = shaken(small("r18-softcap"))
    before = set(model.state_dict())
    with_row_gradients(model, 16)
    assert set(model.state_dict()) == before
    assert not model.state_buffers()
