"""The records' forward passes a second time, from their description alone: one sequence, every rule spelled out.

It reads no config: what a record does is written here by its number. Numbers are in float64, except that frequencies
and rotary tables are rounded as the record rounds them when `formats` is on.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

LAYERS = 12
Weights = dict[str, Tensor]
VALUE_TABLES = {
    4: [None] * 12,
    5: [None] * 12,
    13: [None] * 12,
    14: [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11],
    15: [0, 1, 2, 3, 4, 5, 5, 4, 3, 2, 1, 0],
    16: [0, 1, 2, 3, 4, 5, 5, 4, 3, 2, 1, 0],
    17: [0, 1, 2, None, None, None, None, None, None, 0, 1, 2],
    18: [0, 1, 2, None, None, None, None, None, None, 0, 1, 2],
}


def norm(x: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + eps)


def stream_eps(record: int) -> float:
    return {4: 1e-6, 5: 2.0**-23}.get(record, 2.0**-7)


def turn(u: Tensor, record: int, *, formats: bool) -> Tensor:
    """Rotate (T, heads, D) by minus the angle, dimension j with j + D/2."""
    half = u.size(-1) // 2
    if record >= 17:
        moving = half // 2
        omega = [1024 ** (-j / (moving - 1)) for j in range(moving)] + [0.0] * (half - moving)
    else:
        omega = [10_000 ** (-j / half) for j in range(half)]
    frequency = torch.tensor(omega, dtype=torch.float32)
    if formats and 14 <= record <= 16:
        frequency = frequency.bfloat16().float()
    angle = torch.arange(u.size(0), dtype=torch.float32)[:, None] * frequency
    cos, sin = angle.cos(), angle.sin()
    if formats and 5 <= record <= 17:
        cos, sin = cos.bfloat16(), sin.bfloat16()
    cos, sin = cos.double()[:, None], sin.double()[:, None]
    a, b = u[..., :half], u[..., half:]
    return torch.cat([a * cos + b * sin, -a * sin + b * cos], dim=-1)


def visible(record: int, tokens: Tensor, window: int, end_of_text: int) -> Tensor:
    t = torch.arange(tokens.numel())
    q, k = t[:, None], t[None, :]
    ok = k <= q
    if record < 13:
        return ok
    document = torch.stack([(tokens[: i + 1] == end_of_text).sum() for i in range(tokens.numel())])
    ok = ok & (document[:, None] == document[None, :])
    if record <= 15:
        ok = ok & (q - k < window)
    if record >= 15:
        ok = ok & (q // 128 - k // 128 < math.ceil(window / 128))
    return ok


def extra_value(record: int, w: Weights, layer: int, tokens: Tensor, width: int) -> Tensor | None:
    table = VALUE_TABLES[record][layer]
    if table is None:
        return None
    if record in (14, 15):
        return w["embeddings.value_chunks"][tokens][:, table * width : (table + 1) * width]
    return w[f"embeddings.values.{table}"][tokens]


def attention(
    record: int, w: Weights, layer: int, x: Tensor, tokens: Tensor, mask: Tensor, first: list[Tensor], formats: bool
) -> Tensor:
    heads, width, at = 12 if record == 4 else 6, x.size(1), f"blocks.{layer}.attention."
    if record == 4:
        wq, wk, wv = w[at + "qkv"].split(width)
    else:
        wq, wk, wv = w[at + "query"], w[at + "key"], w[at + "value"]
    q, k, v = x @ wq.T, x @ wk.T, x @ wv.T
    if layer == 0:
        first.append(v)
    extra = extra_value(record, w, layer, tokens, width)
    if record == 13:
        share = w[at + "value_mix"][0]
        v = (1 - share) * v + share * first[0]
    elif record == 14:
        share = w[at + "value_mix"][0]
        v = (1 - share) * v + share * extra
    elif record >= 15:
        v = w[at + "value_mix"][0] * v + (0 if extra is None else w[at + "value_mix"][1] * extra)
    q, k, v = (u.reshape(len(tokens), heads, -1) for u in (q, k, v))
    if record >= 13:
        q, k = norm(q, 2.0**-7), norm(k, 2.0**-7)
    q, k = turn(q, record, formats=formats), turn(k, record, formats=formats)
    if record == 5:
        q, k = norm(q, 2.0**-7), norm(k, 2.0**-7)
    mixed = []
    for head in range(heads):
        scores = q[:, head] @ k[:, head].T / math.sqrt(q.size(-1))
        mixed.append(scores.masked_fill(~mask, -math.inf).softmax(dim=-1) @ v[:, head])
    y = torch.cat(mixed, dim=1) @ w[at + "output"].T
    return y / math.sqrt(24) if record == 4 else y


def mlp(record: int, w: Weights, layer: int, x: Tensor) -> Tensor:
    z = x @ w[f"blocks.{layer}.mlp.up"].T
    hidden = z * 0.5 * (1 + torch.erf(z / math.sqrt(2))) if record == 4 else z.clamp(min=0) ** 2
    return hidden @ w[f"blocks.{layer}.mlp.down"].T


def logits(record: int, w: Weights, tokens: Tensor, window: int, *, end_of_text: int, formats: bool) -> Tensor:
    """(T,) token ids -> (T, head rows)."""
    eps, mask = stream_eps(record), visible(record, tokens, window, end_of_text)
    x = w["embeddings.token"][tokens]
    if record >= 13:
        x = norm(x, eps)
    x0, outputs, first = x, [], []
    for layer in range(LAYERS):
        if record >= 13 and layer >= 6:
            i = layer - 6
            x = x + w["skip_weights"][i] * outputs[5 - i]
        if record >= 13:
            alpha, beta = w[f"blocks.{layer}.x0_mix"]
            x = alpha * x + beta * x0
        if not (record >= 17 and layer == 7):
            x = x + attention(record, w, layer, norm(x, eps), tokens, mask, first, formats)
        x = x + mlp(record, w, layer, norm(x, eps))
        outputs.append(x)
    head = w["embeddings.token"] if record <= 5 else w["head"]
    z = norm(x, eps) @ head.T
    cap = {4: None, 5: None, 18: 15.0}.get(record, 30.0)
    return z if cap is None else cap * torch.tanh(z / cap)


def loss(record: int, w: Weights, tokens: Tensor, targets: Tensor, window: int, *, end_of_text: int) -> Tensor:
    """Mean over a batch of sequences, (B, T) each."""
    rows = [
        F.cross_entropy(logits(record, w, row, window, end_of_text=end_of_text, formats=False), target)
        for row, target in zip(tokens, targets, strict=True)
    ]
    return torch.stack(rows).mean()
