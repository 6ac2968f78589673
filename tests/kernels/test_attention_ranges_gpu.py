"""Attention over intervals of keys on a GPU. The CPU twins are in test_attention_ranges.py."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from kernels.attention_cases import check_parity, documents_of, qkv_of, relative_error
from paceline.backends.ranges import ranges_of
from paceline.kernels.attention_ranges import attend_ranges
from paceline.model.attention import plan_reference
from paceline.model.masks import MaskRule
from paceline.settings.model import ModelConfig, WindowConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("documents", [True, False])
@pytest.mark.parametrize(
    ("unit", "window"), [("blocks", 128), ("blocks", 896), ("tokens", 70), ("tokens_in_blocks", 1000), ("none", 1)]
)
@pytest.mark.parametrize(
    ("dtype", "tolerance", "options"),
    [  # rounded operands: 1e-3 to 1e-2
        pytest.param(torch.bfloat16, 1e-2, {"width": 128}, id="bf16-128"),
        pytest.param(torch.bfloat16, 1e-2, {"width": 64}, id="bf16-64"),
        pytest.param(torch.float16, 1e-2, {"width": 64, "kv_heads": 1, "joined": False}, id="fp16-64-grouped"),
        pytest.param(torch.float32, 1e-5, {"width": 64}, id="fp32-64"),
    ],
)
def test_values_and_gradients_on_a_gpu(
    dtype: torch.dtype, tolerance: float, options: dict[str, int], unit: str, window: int, documents: bool
) -> None:
    """Tiles of which some rows see nothing come with documents and with windows in tokens."""
    check_parity(
        unit,
        documents=documents,
        window=window,
        dtype=dtype,
        device="cuda",
        tolerance=tolerance,
        tokens=4096,
        **options,  # type: ignore[arg-type]
    )


def test_a_long_sequence_on_a_gpu_equals_the_chunked_reference_compiled_and_not() -> None:
    tokens, width, heads = 65_536, 128, 6
    window = WindowConfig(unit="blocks", start_tokens=128, growth_tokens=1664)
    config = ModelConfig(num_heads=heads, head_dim=width, width=heads * width, window=window, document_mask=True)
    ids = documents_of(1, tokens, "cuda", mean_tokens=1000)
    qkv, grad = qkv_of(1, tokens, heads, heads, width, torch.bfloat16, "cuda", joined=True)
    q, k, v = qkv

    def attend(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, size: Tensor) -> Tensor:
        ranges = ranges_of(MaskRule.of(config), ids, tokens, size)
        return attend_ranges(q, k, v, ranges.first_key, ranges.end_query, scale=width**-0.5)

    compiled = torch.compile(attend, fullgraph=True)
    for blocks in (1, 7, 13):
        size = torch.tensor(128 * blocks, dtype=torch.int32, device="cuda")
        exact = [x.detach().float().requires_grad_() for x in qkv]
        judge = plan_reference(config, ids, tokens, size[None])(config.layers[0], *exact)
        expected_all = [judge, *torch.autograd.grad(judge, exact, grad.float())]
        for function in (attend, compiled):
            y = function(q, k, v, ids, size)
            for fast, slow in zip([y, *torch.autograd.grad(y, qkv, grad)], expected_all, strict=True):
                assert relative_error(fast, slow) < 1e-2
