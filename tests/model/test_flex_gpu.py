"""FlexAttention against its plain twin, on a GPU. The CPU twins are in test_masks.py and test_attention.py."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from paceline.backends.attention_plans import plan_flex
from paceline.model.attention import plan_reference
from paceline.model.masks import document_ids
from paceline.settings.model import ModelConfig, WindowConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TOKENS = 2048
PLANS = {"reference": plan_reference, "flex": plan_flex}


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    """Every test compiles the same function for other masks; together they would pass the compiler's limit."""
    torch._dynamo.reset()


WINDOWS = {
    "blocks": WindowConfig(unit="blocks", start_tokens=128, growth_tokens=1728, quantum_tokens=128),
    "tokens": WindowConfig(unit="tokens", start_tokens=64, growth_tokens=1728, quantum_tokens=64),
    "tokens_in_blocks": WindowConfig(unit="tokens_in_blocks", start_tokens=64, growth_tokens=1728, quantum_tokens=64),
    "none": WindowConfig(unit="none"),
}


def attention_inputs(config: ModelConfig, sequences: int) -> tuple[Tensor, list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, 300, (sequences, TOKENS), generator=generator)
    tokens[torch.rand(tokens.shape, generator=generator) < 1 / 300] = 0
    shapes = [
        (sequences, TOKENS, heads, config.head_dim) for heads in (config.num_heads, config.kv_heads, config.kv_heads)
    ]
    qkv = [torch.randn(shape, generator=generator).cuda().requires_grad_() for shape in shapes]
    return document_ids(tokens, 0).cuda(), qkv


def run(backend: str, config: ModelConfig, documents: Tensor, qkv: list[Tensor], window: Tensor) -> list[Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor, documents: Tensor, window: Tensor) -> Tensor:
        plan = PLANS[backend](config, documents if config.document_mask else None, TOKENS, window)
        return plan(config.layers[0], q, k, v)

    compiled = torch.compile(attend, fullgraph=True, dynamic=False) if backend == "flex" else attend
    q, k, v = qkv
    y = compiled(q, k, v, documents, window)
    return [y, *torch.autograd.grad(y.float().square().sum(), qkv)]


@pytest.mark.parametrize("unit", WINDOWS)
@pytest.mark.parametrize("documents", [True, False])
def test_flex_equals_the_reference_in_value_and_gradient(unit: str, documents: bool) -> None:
    config = ModelConfig(num_heads=2, head_dim=128, width=256, window=WINDOWS[unit], document_mask=documents)
    doc, qkv = attention_inputs(config, sequences=2)
    low = [x.detach().bfloat16().requires_grad_() for x in qkv]
    for tokens in (128, 640, 1792):
        window = torch.tensor([tokens], dtype=torch.int32, device="cuda")
        judge = run("reference", config, doc, [x.detach().bfloat16().double().requires_grad_() for x in low], window)
        for fast, exact in zip(run("flex", config, doc, low, window), judge, strict=True):
            error = (fast.double() - exact).norm() / exact.norm()
            assert error < 1e-2, f"window {tokens}: relative error {error:.1e}"  # bf16 operands: 1e-3 to 1e-2


def test_flex_with_grouped_heads_equals_the_reference() -> None:
    config = replace(
        ModelConfig(num_heads=4, head_dim=64, width=256, document_mask=True), num_kv_heads=2, window=WINDOWS["blocks"]
    )
    doc, qkv = attention_inputs(config, sequences=1)
    window = torch.tensor([384], dtype=torch.int32, device="cuda")
    low = [x.detach().bfloat16().requires_grad_() for x in qkv]
    judge = run("reference", config, doc, [x.detach().bfloat16().double().requires_grad_() for x in low], window)
    for fast, exact in zip(run("flex", config, doc, low, window), judge, strict=True):
        assert (fast.double() - exact).norm() / exact.norm() < 1e-2
