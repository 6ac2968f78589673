"""The asynchronous attention kernels against the Triton ones and float64 on a GPU."""

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton.experimental.gluon")

from kernels.attention_cases import documents_of, qkv_of, relative_error
from kernels.fused_cases import joined_errors
from paceline.backends.ranges import Ranges, failed_trial, ranges_of
from paceline.kernels import attention_async, attention_ranges
from paceline.kernels.attention import attend_dense
from paceline.model.masks import MaskRule, dense_mask
from paceline.settings.model import ModelConfig, WindowConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LAUNCHES = 10
"""A race shows in some launches only."""
NEIGHBOUR = """
import torch
x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
print("ready", flush=True)
while True:
    for _ in range(20):
        x @ x
    torch.cuda.synchronize()
"""


def mask_of(unit: str, window: int, sequences: int, tokens: int) -> tuple[Ranges, Tensor]:
    rule = MaskRule.of(ModelConfig(window=WindowConfig(unit=unit), document_mask=True))  # type: ignore[arg-type]
    ids = documents_of(sequences, tokens, "cuda", mean_tokens=150)
    size = torch.tensor(window, dtype=torch.int32, device="cuda")
    return ranges_of(rule, ids, tokens, size), dense_mask(rule, ids, tokens, size)


def outputs(qkv: list[Tensor], grad: Tensor, ranges: Ranges) -> list[Tensor]:
    """Output and the gradients of q, k and v, by their kernels and tiles."""
    (q, k, v), module, scale = qkv, attention_async, qkv[0].size(3) ** -0.5
    out, lse = module.launch_forward(q, k, v, ranges.first_key, scale, module.FORWARD)
    grads = [torch.full_like(x, float("nan")) for x in (q, k, v)]
    delta = module.launch_query_gradient(
        grad, q, k, v, out, lse, ranges.first_key, scale, module.BACKWARD_QUERIES, grads[0]
    )
    module.launch_key_gradient(
        grad, q, k, v, lse, delta, ranges.end_query, scale, module.BACKWARD_KEYS, grads[1], grads[2]
    )
    return [out, *grads]


@pytest.mark.parametrize(("unit", "window"), [("blocks", 128), ("blocks", 896), ("tokens", 70), ("none", 1)])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(2, 2, 128), (4, 2, 128), (2, 2, 64)])
@pytest.mark.parametrize(("sequences", "tokens"), [(2, 2048), (1, 256)])
def test_values_and_gradients_equal_float64_at_every_launch(
    unit: str, window: int, heads: int, kv_heads: int, width: int, sequences: int, tokens: int
) -> None:
    ranges, mask = mask_of(unit, window, sequences, tokens)
    qkv, grad = qkv_of(sequences, tokens, heads, kv_heads, width, torch.bfloat16, "cuda", joined=True)
    qkv = [x.detach() for x in qkv]
    exact = [x.double().requires_grad_() for x in qkv]
    judge = attend_dense(*exact, mask, scale=width**-0.5)
    expected = [judge, *torch.autograd.grad(judge, exact, grad.double())]
    first = outputs(qkv, grad, ranges)
    for name, found, slow in zip(("output", "q", "k", "v"), first, expected, strict=True):
        assert relative_error(found, slow) < 1e-2, name  # rounded operands: 1e-3 to 1e-2
    for _ in range(LAUNCHES):
        assert all(map(torch.equal, outputs(qkv, grad, ranges), first))


@pytest.mark.parametrize(("mixed", "value_embed"), [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2)])
def test_gradients_of_projections_equal_float64(mixed: bool, value_embed: bool, heads: int, kv_heads: int) -> None:
    """The endings of the backward kernels carry gradients through rotary, norm and value mix. The CPU twin, by Triton's
    kernels one after the other, is in interpreted_fused.py."""
    found = joined_errors(
        (heads, kv_heads, 128), rotary_fraction=0.5, mixed=mixed, value_embed=value_embed, sequence=1024, sequences=2,
        device="cuda", dtype=torch.bfloat16, depth=256, window=384,
    )  # fmt: skip
    assert max(found) < 2e-2


def test_triton_kernels_pass_the_trial_that_other_gpus_are_put_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_ranges, "in_flight", lambda _: False)
    assert [failed_trial.__wrapped__(width) for width in (64, 128)] == [None, None]


@pytest.fixture
def neighbour() -> Iterator[None]:
    """Another process that keeps the same GPU busy, so that programs of ours are interrupted anywhere."""
    with subprocess.Popen([sys.executable, "-c", NEIGHBOUR], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield
        process.kill()


@pytest.mark.usefixtures("neighbour")
def test_every_launch_has_the_same_bits_beside_another_process() -> None:
    ranges, _ = mask_of("blocks", 896, 1, 16384)
    qkv, grad = qkv_of(1, 16384, 6, 6, 128, torch.bfloat16, "cuda", joined=True)
    qkv = [x.detach() for x in qkv]
    first = outputs(qkv, grad, ranges)
    differing, end = torch.zeros(4, device="cuda"), time.monotonic() + 5
    while time.monotonic() < end:
        for _ in range(20):
            again = outputs(qkv, grad, ranges)
            differing += torch.stack([(a != b).any() for a, b in zip(again, first, strict=True)])
        torch.cuda.synchronize()
    assert differing.tolist() == [0, 0, 0, 0]
