"""How much arithmetic a token costs, from the model's own description. No torch.

Counted: the products with weights (6 per weight and token: 2 forward, 4 backward) and attention's two products over
the keys that the window lets through. Not counted: norms, rotary, the loss, the optimizer, recomputation; and document
borders, which depend on the data, so that with a document mask the attention part is an upper bound.
"""

import functools
from collections.abc import Iterable, Mapping

from paceline.core.units import BLOCK_TOKENS
from paceline.settings.model import ModelConfig, WindowKind
from paceline.settings.run import RunConfig
from paceline.settings.schedule import candidates_at, sampled_steps, tokens_by_windows, tokens_of
from paceline.settings.spec import describe

DENSE_BF16_FLOPS = {
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA L4": 121e12,
    "NVIDIA GeForce RTX 3090": 71e12,
    "NVIDIA GeForce RTX 4090": 165e12,
    "NVIDIA GeForce RTX 5090": 210e12,
}
"""The makers' figures without sparsity, by the name the driver gives, matched whole."""


def flops_per_token(model: ModelConfig, *, sequence_tokens: int, windows: Mapping[WindowKind, int]) -> float:
    """Forward and backward arithmetic of one token at one window of each kind."""
    unit, kinds = model.window.unit, {shape.window for shape in model.attending}
    keys = {kind: mean_visible_keys(unit, windows.get(kind), sequence_tokens) for kind in kinds}
    return 6 * describe(model).product_weights() + attention_flops(model, keys)


def attention_flops(model: ModelConfig, keys: Mapping[WindowKind, float]) -> float:
    """Of a token, by the keys of a query: scores and mix, 2 · 2 FLOP a key forward, twice that backward."""
    return sum(6 * keys[s.window] * s.num_heads * (s.qk_dim + s.v_dim) for s in model.attending)


def mean_flops_per_token(run: RunConfig) -> float:
    """The same, averaged over the tokens of a run in which windows, batches and candidates change."""
    steps = sampled_steps(run.steps)
    tokens = tokens_by_windows(run, steps)
    costs = [flops_per_token(run.model, sequence_tokens=run.batch.sequence_tokens, windows=dict(key)) for key in tokens]
    of_all = sum(cost * n for cost, n in zip(costs, tokens.values(), strict=True))
    return of_all / tokens.total() - 6 * run.model.width * run.model.lm_head_rows * (1 - head_share(run, steps))


def head_share(run: RunConfig, steps: Iterable[int]) -> float:
    """Of the logits of these steps' tokens, the share that training computes: a sampled softmax leaves some out."""
    rows, tokens = run.model.lm_head_rows, {step: tokens_of(run, step) for step in steps}
    computed = sum((candidates_at(run, step) or rows) * n for step, n in tokens.items())
    return computed / (rows * sum(tokens.values()))


@functools.cache
def mean_visible_keys(unit: str, window_tokens: int | None, sequence_tokens: int) -> float:
    """Keys that a query sees, averaged over the positions of one sequence that holds one document."""
    import numpy as np

    positions = np.arange(sequence_tokens)
    visible = positions + 1
    if window_tokens is not None and unit in ("tokens", "tokens_in_blocks"):
        visible = np.minimum(visible, window_tokens)
    if window_tokens is not None and unit in ("blocks", "tokens_in_blocks"):
        blocks_back = -(-window_tokens // BLOCK_TOKENS) - 1
        visible = np.minimum(visible, blocks_back * BLOCK_TOKENS + positions % BLOCK_TOKENS + 1)
    return float(visible.mean())


def utilisation(flops_per_token: float, tokens_per_s: float | None, gpu: str | None, *, gpus: int = 1) -> float | None:
    """Share of the GPUs' bf16 peak that the model's arithmetic used; None on a device whose peak is not listed."""
    peak = DENSE_BF16_FLOPS.get(gpu or "")
    return None if peak is None or tokens_per_s is None else flops_per_token * tokens_per_s / (peak * gpus)
