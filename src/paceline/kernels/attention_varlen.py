"""Attention within segments that lie end to end, by FlashAttention: version 2, in PyTorch, or 3.

Query q sees the keys of its own segment from q - window + 1 to q; the plain twin is `attend_dense` under that mask.
Both libraries take the window as a number when they launch. So it comes as a 0-D tensor on the host, which costs no
wait (on the device it costs one a layer), and an operator of ours reads it, so that a new window compiles nothing, as
it would with `torch.nn.attention.varlen`. Shapes must not change, so there are places for more segments than come.
Query gradients are added in the order of arrival: a deterministic run refuses both, and `auto` never takes them.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

SEGMENT_TOKENS = 128
"""Places for segments are made for this length on average."""
LEAST_PLACES = 512
"""And at least so many, or one for each token."""


def attend_packed(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, window: Tensor | None, *, scale: float, version: int
) -> Tensor:
    """q (B, T, H, D), k and v (B, T, H_kv, D), in half precision -> (B, T, H, D). `starts` as of `segment_starts`, none
    longer than T; window 0-D, best on the host, None for no limit; version 3 must be loaded."""
    out: Tensor = attend_forward(q, k, v, starts, window, scale, version)[0]
    return out


def places_for(tokens: int) -> int:
    return min(tokens, max(LEAST_PLACES, tokens // SEGMENT_TOKENS))


@torch.library.custom_op("paceline::segment_starts", mutates_args=())
def segment_starts(ids_BT: Tensor) -> Tensor:
    """(places + 1,) int32: where each segment of the B·T tokens begins, B·T in the places that are left. A segment ends
    with its sequence and where the id changes. More segments than places stop the run: on a CPU with an error, on a GPU
    with a failed assertion at the next wait."""
    total = ids_BT.numel()
    opens = F.pad(ids_BT.diff(dim=1) != 0, (1, 0), value=True)
    segment = opens.flatten().cumsum(0, dtype=torch.int32) - 1
    places = torch.arange(places_for(total) + 1, dtype=torch.int32, device=ids_BT.device)
    starts = torch.searchsorted(segment, places, out_int32=True)  # the first token of that number or a later one
    torch._assert_async(starts[-1] == total, f"{total:,} tokens have more than {places_for(total):,} documents")
    return starts


@segment_starts.register_fake
def _(ids_BT: Tensor) -> Tensor:
    return ids_BT.new_empty(places_for(ids_BT.numel()) + 1, dtype=torch.int32)


def sequence_starts(sequences: int, tokens: int, device: torch.device) -> Tensor:
    """The same where every sequence is one segment."""
    return torch.arange(0, sequences * tokens + 1, tokens, dtype=torch.int32, device=device)


def keys_before(window: Tensor | None) -> int:
    """How many keys before itself a query sees under a window of W tokens, its own among them; -1: all of its
    segment."""
    return -1 if window is None else int(window) - 1


def _varlen(
    starts: Tensor, longest: int, window: Tensor | None, scale: float
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What PyTorch's operators take besides tensors: segments of queries and of keys, the longest of each, dropout, and
    whether causal is all there is; the rest by name."""
    left = keys_before(window)
    named = {"scale": scale, "window_size_left": left, "window_size_right": 0}
    return (starts, starts, longest, longest, 0.0, left < 0), named


def _fa3(starts: Tensor, longest: int, window: Tensor | None, scale: float) -> dict[str, Any]:
    """The same for FlashAttention 3."""
    segments = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": longest, "max_seqlen_k": longest}
    limits = {"is_causal": True, "window_size_left": keys_before(window), "window_size_right": 0}
    return {**segments, **limits, "softmax_scale": scale}


@torch.library.custom_op("paceline::attend_packed", mutates_args=())
def attend_forward(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, window: Tensor | None, scale: float, version: int
) -> tuple[Tensor, Tensor]:
    """Outputs and the logarithm of the softmax sums, (H, B·T) fp32."""
    rows, launch = [x.flatten(0, 1) for x in (q, k, v)], (starts, q.size(1), window, scale)
    if version == 3:
        out, lse, *_ = torch.ops.flash_attn_3.fwd(*rows, num_splits=1, **_fa3(*launch))
    else:
        sizes, named = _varlen(*launch)
        out, lse, *_ = torch.ops.aten._flash_attention_forward(*rows, *sizes, False, **named)
    return out.contiguous().view(q.shape), lse


@torch.library.custom_op("paceline::attend_packed_backward", mutates_args=())
def attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, starts: Tensor, window: Tensor | None,
    scale: float, version: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and v."""
    rows, launch = [x.flatten(0, 1) for x in (grad.contiguous(), q, k, v, out)], (starts, q.size(1), window, scale)
    if version == 3:
        grads = [x.new_empty(x.shape) for x in rows[1:4]]
        torch.ops.flash_attn_3.bwd(*rows, lse, *grads, deterministic=False, **_fa3(*launch))
    else:
        sizes, named = _varlen(*launch)
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device), q.new_empty(0)
        grads = torch.ops.aten._flash_attention_backward(*rows, lse, *sizes, *no_dropout, **named)
    grad_q, grad_k, grad_v = (g.contiguous().view(x.shape) for g, x in zip(grads, (q, k, v), strict=True))
    return grad_q, grad_k, grad_v


@attend_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, window: Tensor | None, scale: float, version: int) -> Any:
    batch, tokens, heads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((heads, batch * tokens), dtype=torch.float32)


@attend_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, starts, window, ctx.scale, ctx.version = inputs
    ctx.save_for_backward(q, k, v, *output, starts, window)


def _backward(ctx: Any, grad: Tensor, _grad_lse: Tensor) -> tuple[Tensor | None, ...]:
    return *attend_backward(grad, *ctx.saved_tensors, ctx.scale, ctx.version), None, None, None, None


attend_forward.register_autograd(_backward, setup_context=_keep)
