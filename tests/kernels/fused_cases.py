"""Fused kernels against their plain meaning in float64, on any device and in any format."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kernels.attention_cases import documents_of
from paceline.backends.ranges import ranges_of
from paceline.kernels.attention import attend_dense
from paceline.kernels.attention_block import attend_joined
from paceline.kernels.head_loss_fused import head_loss_fused
from paceline.kernels.mlp_fused import mlp_fused
from paceline.kernels.qkv_rope import qkv_rope
from paceline.model.loss import IGNORE_TARGET
from paceline.model.masks import MaskRule, dense_mask
from paceline.model.rotary import rotary_tables
from paceline.settings.model import ModelConfig, RotaryConfig, WindowConfig

EPS = 2.0**-7


def seeded(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def relative_error(found: Tensor, judge: Tensor) -> float:
    found, judge = found.detach().double(), judge.detach().double().to(found.device)
    return float((found - judge).norm() / judge.norm().clamp(min=1e-30))


def errors(
    fast: Callable[..., Sequence[Tensor]],
    plain: Callable[..., Sequence[Tensor]],
    inputs: Sequence[Tensor | None],
    *,
    device: str,
    dtypes: Sequence[torch.dtype],
) -> list[float]:
    """Relative errors of all outputs and of the gradients of all inputs. Outputs are weighted by themselves and some
    noise: sums over all tokens, as the gradient of a scalar, then do not cancel to almost nothing."""
    given = [None if x is None else x.to(device, dtype) for x, dtype in zip(inputs, dtypes, strict=True)]
    mine = [None if x is None else x.clone().requires_grad_() for x in given]
    judge = [None if x is None else x.double().clone().requires_grad_() for x in given]
    outputs, expected = fast(*mine), plain(*judge)
    noise = [seeded(*y.shape, seed=9 + n).to(y) for n, y in enumerate(expected)]
    weights = [y.detach() + z if y.dim() else torch.ones_like(y) for y, z in zip(expected, noise, strict=True)]
    torch.autograd.backward(outputs, [w.to(y.dtype) for w, y in zip(weights, outputs, strict=True)])
    torch.autograd.backward(expected, [w.to(y.dtype).to(w) for w, y in zip(weights, outputs, strict=True)])
    grads = [(a.grad, b.grad) for a, b in zip(mine, judge, strict=True) if a is not None and b is not None]
    pairs = [*zip(outputs, expected, strict=True), *((a, b) for a, b in grads if a is not None and b is not None)]
    return [relative_error(a, b) for a, b in pairs]


def head_errors(
    tokens: int, vocab: int, cap: float | None, shift: float = 0.0, *, device: str, dtype: torch.dtype
) -> list[float]:
    targets = torch.randint(0, vocab, (tokens,), generator=torch.Generator().manual_seed(3)).to(device)
    targets[2::7] = IGNORE_TARGET

    def plain(x: Tensor, weight: Tensor) -> list[Tensor]:
        z = x @ weight.T
        z = z if cap is None else cap * torch.tanh((z + shift) / cap)
        return [F.cross_entropy(z, targets, reduction="sum", ignore_index=IGNORE_TARGET)]

    return errors(
        lambda x, weight: [head_loss_fused(x, weight, targets, cap, shift)],
        plain,
        [seeded(tokens, 32, seed=1), seeded(vocab, 32, seed=2)],
        device=device,
        dtypes=[dtype, dtype],
    )


def mlp_errors(tokens: int, width: int, hidden: int, *, device: str, dtype: torch.dtype) -> list[float]:
    shapes = ((tokens, width), (hidden, width), (width, hidden))
    return errors(
        lambda x, up, down: [mlp_fused(x, up, down)],
        lambda x, up, down: [F.relu(x @ up.T).square() @ down.T],
        [seeded(*shape, seed=number) for number, shape in enumerate(shapes, start=1)],
        device=device,
        dtypes=[dtype] * 3,
    )


def heads_in_float64(
    cos: Tensor, sin: Tensor, shape: tuple[int, int, int], sequences: int
) -> Callable[..., list[Tensor]]:
    """(x, weight, rows of a value table, mix) -> q, k, v."""
    heads, kv_heads, width = shape

    def positioned(x: Tensor) -> Tensor:
        x = x / torch.sqrt(x.square().mean(-1, keepdim=True) + EPS)
        c, s = (table.double().repeat(sequences, 1)[:, None] for table in (cos, sin))
        half, pairs = width // 2, c.size(-1)
        a, a_rest, b, b_rest = x.split([pairs, half - pairs, pairs, half - pairs], dim=-1)
        return torch.cat([a * c + b * s, a_rest, b * c - a * s, b_rest], dim=-1)

    def plain(x: Tensor, weight: Tensor, rows_of_table: Tensor | None, mix: Tensor | None) -> list[Tensor]:
        q, k, v = (x @ weight.T).unflatten(-1, (-1, width)).split([heads, kv_heads, kv_heads], dim=1)
        if mix is not None:
            v = mix[0] * v + (0 if rows_of_table is None else mix[1] * rows_of_table)
        return [positioned(q), positioned(k), v]

    return plain


def heads_inputs(
    rows: int, depth: int, shape: tuple[int, int, int], *, mixed: bool, value_embed: bool
) -> list[Tensor | None]:
    heads, kv_heads, width = shape
    return [
        seeded(rows, depth, seed=1),
        seeded((heads + 2 * kv_heads) * width, depth, seed=2, scale=depth**-0.5),
        seeded(rows, kv_heads, width, seed=3) if value_embed else None,
        torch.tensor([0.4, 0.7]) if mixed else None,
    ]


def rotary_rows(sequence: int, width: int, rotary_fraction: float, device: str) -> tuple[Tensor, Tensor]:
    rotary = RotaryConfig(base=1024.0, rotary_fraction=rotary_fraction, max_tokens=sequence)
    cos, sin = rotary_tables(rotary, width)
    return cos.to(device), sin.to(device)


def recomputed(function: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
    """As under `train.recompute`, where every kept tensor may be read once."""
    return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False, **named)


def heads_errors(
    shape: tuple[int, int, int],
    *,
    rotary_fraction: float,
    mixed: bool,
    value_embed: bool,
    sequence: int,
    sequences: int,
    device: str,
    dtype: torch.dtype,
    depth: int = 24,
) -> list[float]:
    cos, sin = rotary_rows(sequence, shape[2], rotary_fraction, device)
    return errors(
        lambda x, weight, table, mix: recomputed(qkv_rope, x, weight, table, mix, cos, sin, EPS, shape),
        heads_in_float64(cos, sin, shape, sequences),
        heads_inputs(sequence * sequences, depth, shape, mixed=mixed, value_embed=value_embed),
        device=device,
        dtypes=[dtype, dtype, dtype, torch.float32],
    )


def joined_errors(
    shape: tuple[int, int, int],
    *,
    rotary_fraction: float,
    mixed: bool,
    value_embed: bool,
    sequence: int,
    sequences: int,
    device: str,
    dtype: torch.dtype,
    depth: int = 24,
    window: int = 128,
) -> list[float]:
    """Stream to attended values, under documents and a window in blocks."""
    cos, sin = rotary_rows(sequence, shape[2], rotary_fraction, device)
    config = ModelConfig(window=WindowConfig(unit="blocks"), document_mask=True)
    documents = documents_of(sequences, sequence, device, mean_tokens=150)
    seen = (MaskRule.of(config), documents, sequence, torch.tensor(window, dtype=torch.int32, device=device))
    ranges, mask = ranges_of(*seen), dense_mask(*seen)
    make, scale = heads_in_float64(cos, sin, shape, sequences), shape[2] ** -0.5

    def fast(x: Tensor, weight: Tensor, table: Tensor | None, mix: Tensor | None) -> list[Tensor]:
        keys = (ranges.first_key, ranges.end_query)
        return [recomputed(attend_joined, x, weight, table, mix, cos, sin, *keys, EPS, shape, scale=scale)]

    def plain(*inputs: Tensor | None) -> list[Tensor]:
        q, k, v = (heads.unflatten(0, (sequences, sequence)) for heads in make(*inputs))
        return [attend_dense(q, k, v, mask, scale=scale).flatten(0, 1)]

    return errors(
        fast,
        plain,
        heads_inputs(sequence * sequences, depth, shape, mixed=mixed, value_embed=value_embed),
        device=device,
        dtypes=[dtype, dtype, dtype, torch.float32],
    )
