"""How many parameters a model has and how much arithmetic a token costs, by formula. No torch.

Counted: the products with weights (6 per weight and token: 2 forward, 4 backward) and attention's two products over
the keys that the window lets through. Not counted: norms, rotary, the loss, the optimizer, recomputation; and document
borders, which depend on the data, so that with a document mask the attention part is an upper bound.
"""

import functools

from paceline.core.units import BLOCK_TOKENS
from paceline.model.config import ModelConfig

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
"""The makers' figures by the name the driver gives, without sparsity. Names are matched whole: a guess from a part of
a name would give a wrong utilisation without a word."""


def parameter_counts(model: ModelConfig) -> dict[str, int]:
    """Parameters by part, and `total`. A tied head counts once, as the token embedding."""
    counts = {
        "token_embedding": model.embedding_rows * model.width,
        "value_embeddings": model.num_value_tables * model.embedding_rows * model.kv_width,
        "head": 0 if model.tied_head else model.head_rows * model.width,
        "block_matrices": block_matrix_weights(model),
        "scalars": _scalars(model),
    }
    return {**counts, "total": sum(counts.values())}


def block_matrix_weights(model: ModelConfig) -> int:
    """Weights of queries, keys, values, outputs and the MLP, over all blocks."""
    attention = 2 * model.width * (model.width + model.kv_width)
    mlp = 2 * model.width * model.mlp_width
    return _attention_layers(model) * attention + model.num_layers * mlp


def _scalars(model: ModelConfig) -> int:
    x0_mix = 2 * model.num_layers if model.x0_mix else 0
    skips = model.num_layers // 2 if model.unet_skips else 0
    value_mix = model.value_lambdas * _attention_layers(model) if model.value_path != "plain" else 0
    return x0_mix + skips + value_mix


def _attention_layers(model: ModelConfig) -> int:
    return model.num_layers - len(model.attentionless)


def flops_per_token(model: ModelConfig, *, sequence_tokens: int, window_tokens: int | None) -> float:
    """Forward and backward arithmetic of one token at one window."""
    weights = block_matrix_weights(model) + model.head_rows * model.width  # a tied head is multiplied all the same
    keys = mean_visible_keys(model.window.unit, window_tokens, sequence_tokens)
    attention = 12 * keys * model.width * _attention_layers(model)  # scores and mix: 2 * 2 forward, twice that backward
    return 6 * weights + attention


SAMPLED_STEPS = 10_000
"""About so many steps of a longer run are looked at for their window."""


def sampled_steps(steps: int) -> range:
    """Every step of a run, or of a very long one an even sample."""
    return range(0, steps, max(1, steps // SAMPLED_STEPS))


def mean_flops_per_token(model: ModelConfig, *, sequence_tokens: int, steps: int) -> float:
    """The same, averaged over a run in which the window grows."""
    windows = [model.window.tokens_at(step, steps) for step in sampled_steps(steps)]
    costs = {
        window: flops_per_token(model, sequence_tokens=sequence_tokens, window_tokens=window) for window in set(windows)
    }
    return sum(costs[window] for window in windows) / len(windows)


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
