"""FlashAttention over packed documents on a GPU. The CPU twins are in test_attention_varlen.py. For `fa3` without the
package, PACELINE_FA3_LIBRARY names the library."""

import pytest
import torch
from torch import Tensor

from kernels.attention_cases import documents_of, qkv_of, relative_error
from paceline.backends.attention_plans import plan_packed
from paceline.core.probe import flash_attention_3, varlen_attention
from paceline.model.attention import plan_reference
from paceline.model.masks import window_tensor
from paceline.settings.model import ModelConfig, WindowConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TOLERANCE = 1e-2  # bf16 operands: 2e-3 to 5e-3


def need(version: int) -> None:
    verdict = varlen_attention("cuda") if version == 2 else flash_attention_3("cuda")
    if not verdict.usable:
        pytest.skip(verdict.reason)


def config_of(unit: str, *, documents: bool, heads: int, kv_heads: int, width: int) -> ModelConfig:
    window = WindowConfig(unit=unit, start_tokens=64, growth_tokens=1728, quantum_tokens=64)  # type: ignore[arg-type]
    return ModelConfig(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=width,
        width=heads * width,
        window=window,
        document_mask=documents,
    )


def results(y: Tensor, qkv: list[Tensor], grad: Tensor) -> dict[str, Tensor]:
    return dict(zip(("output", "q", "k", "v"), (y, *torch.autograd.grad(y, qkv, grad)), strict=True))


def judge(config: ModelConfig, ids: Tensor | None, window: int, qkv: list[Tensor], grad: Tensor) -> dict[str, Tensor]:
    """The plain twin in fp32 of the same bf16 values."""
    exact = [x.detach().float().requires_grad_() for x in qkv]
    attend = plan_reference(config, ids, qkv[0].size(1), window_tensor([window], torch.device("cuda")))
    return results(attend(config.layers[0], *exact), exact, grad.float())


def compare(found: dict[str, Tensor], exact: dict[str, Tensor]) -> None:
    for name, values in found.items():
        assert values.isfinite().all(), name
        assert relative_error(values, exact[name]) < TOLERANCE, name


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize(
    ("unit", "window", "documents"),
    [("tokens", 64, True), ("tokens", 1792, True), ("tokens", 300, False), ("none", 0, True)],
)
@pytest.mark.parametrize("joined", [True, False])
def test_values_and_gradients_are_those_of_the_mask(
    version: int, width: int, unit: str, window: int, documents: bool, joined: bool
) -> None:
    """Two sequences, grouped heads."""
    need(version)
    config = config_of(unit, documents=documents, heads=4, kv_heads=2, width=width)
    ids = documents_of(2, 4096, "cuda", mean_tokens=150) if documents else None
    qkv, grad = qkv_of(2, 4096, 4, 2, width, torch.bfloat16, "cuda", joined=joined)
    on_host = window_tensor([window], torch.device("cpu"))
    y = plan_packed(version)(config, ids, 4096, on_host)(config.layers[0], *qkv)
    compare(results(y, qkv, grad), judge(config, ids, window, qkv, grad))


@pytest.mark.parametrize("version", [2, 3])
def test_a_growing_window_on_the_host_compiles_once_and_makes_nobody_wait(version: int) -> None:
    need(version)
    config, tokens = config_of("tokens", documents=True, heads=6, kv_heads=6, width=128), 65_536
    qkv, grad = qkv_of(1, tokens, 6, 6, 128, torch.bfloat16, "cuda", joined=True)
    window, plan = window_tensor([64], torch.device("cpu")), plan_packed(version)
    _ = config.attending  # a model that is built has cached it; caching it while it is traced would compile twice

    def attend(ids: Tensor, window: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return plan(config, ids, tokens, window)(config.layers[0], q, k, v)

    compiled = torch.compile(attend, fullgraph=True, dynamic=False)
    ids = documents_of(1, tokens, "cuda", mean_tokens=700)
    results(compiled(ids, window, *qkv), qkv, grad)  # compiles both passes
    for size, mean_tokens in ((64, 700), (896, 2000), (1792, 300)):
        ids = documents_of(1, tokens, "cuda", mean_tokens=mean_tokens)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            window.fill_(size)
            with torch.compiler.set_stance("fail_on_recompile"):
                found = results(compiled(ids, window, *qkv), qkv, grad)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        compare(found, judge(config, ids, size, qkv, grad))
