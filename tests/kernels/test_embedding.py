"""The sorted gradient of a table against that of F.embedding, in float64 where both might be wrong."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.kernels.embedding import look_up_sorted, sorted_row_sums

ROWS, WIDTH = 40, 6


def sample(shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    """Tokens (token 0 very often, the last rows never), a table, and gradients of what is looked up."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, ROWS - 5, shape, generator=generator, dtype=torch.int32)
    tokens[torch.rand(shape, generator=generator) < 0.3] = 0
    table = torch.randn(ROWS, WIDTH, generator=generator).to(dtype)
    grad = torch.randn(*shape, WIDTH, generator=generator).to(dtype)
    return tokens.to(device), table.to(device).requires_grad_(), grad.to(device)


def gradient(tokens: Tensor, grad: Tensor) -> Tensor:
    """In float64, token by token."""
    exact = torch.zeros(ROWS, WIDTH, dtype=torch.float64, device=grad.device)
    return exact.index_add_(0, tokens.flatten().long(), grad.flatten(0, -2).double())


@pytest.mark.parametrize("shape", [(1,), (7,), (3, 129), (2, 1000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_and_gradient_are_those_of_the_plain_twin(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tokens, table, grad = sample(shape, dtype)
    found = look_up_sorted(tokens, table)
    assert torch.equal(found, F.embedding(tokens, table))
    found.backward(grad)
    assert table.grad is not None
    assert table.grad.dtype == dtype
    rounding = 2**-8 if dtype == torch.bfloat16 else 1e-6  # summed in fp32, rounded once
    torch.testing.assert_close(table.grad.double(), gradient(tokens, grad), rtol=rounding, atol=1e-5)


def test_a_slice_of_a_table_gets_its_columns_of_the_gradient() -> None:
    tokens, table, grad = sample((50,), torch.float32)
    look_up_sorted(tokens, table[:, 2:4]).backward(grad[:, 2:4])
    assert table.grad is not None
    torch.testing.assert_close(table.grad[:, 2:4].double(), gradient(tokens, grad)[:, 2:4], rtol=1e-6, atol=1e-5)
    assert not table.grad[:, :2].any()
    assert not table.grad[:, 4:].any()


@pytest.mark.slow
def test_it_keeps_the_rules_of_an_operator() -> None:
    tokens, table, grad = sample((20,), torch.float32)
    torch.library.opcheck(sorted_row_sums, (grad, tokens, ROWS))
    torch.library.opcheck(torch.ops.paceline.look_up_sorted.default, (tokens, table))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_the_bits_repeat_and_are_the_sum(dtype: torch.dtype) -> None:
    tokens, _, grad = sample((65_536,), dtype, "cuda")
    first, second = (sorted_row_sums(grad, tokens, ROWS) for _ in range(2))
    assert torch.equal(first, second)
    torch.testing.assert_close(first.double(), gradient(tokens, grad), rtol=2**-7, atol=1e-2)
