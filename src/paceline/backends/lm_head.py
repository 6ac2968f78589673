"""Who computes output layer and loss. No torch."""

from collections.abc import Callable
from functools import partial
from typing import Any

from paceline.backends.registry import FP32, Backend, Kept, Request, custom_backend, imported
from paceline.settings.backends import FUSED_CHUNK_TOKENS, head_chunk_tokens


def in_chunks() -> Backend:
    """The one by chunks that works everywhere."""
    return next(backend for backend in BACKENDS if backend.short_chunk_tokens and not backend.custom)


def _by_chunks(module: str, name: str) -> Callable[[Request], Any]:
    """A `build` of a kernel that takes the chunk of the request."""
    return lambda request: partial(imported(module, name)(request), chunk_tokens=request.lm_head_chunk_tokens)


def _chunked_reason(request: Request) -> str:
    if request.compiled:
        return "asked for by --lm-head.chunk-tokens"
    return "without a compiler, chunks save the passes over all logits"


def _chunks_pay_not(request: Request) -> str | None:
    return "the compiler fuses cap and loss" if request.compiled and request.lm_head_chunk_tokens is None else None


def _chunks_without_use(request: Request) -> str | None:
    chunk = request.lm_head_chunk_tokens
    return None if chunk is None else f"it holds all logits, so --lm-head.chunk-tokens {chunk} is of no use"


def _tokens(at: Kept) -> int:
    return at.sequence_tokens * at.micro_sequences


def _matrix(at: Kept) -> int:
    return at.model.lm_head_rows * at.model.width


def _cast(at: Kept) -> int:
    """Bytes of the head in the format of the products, where that is another than its own."""
    return 0 if at.compute_bytes == FP32 else at.compute_bytes * _matrix(at)


def _reference_kept(at: Kept) -> float:
    """Logits; uncompiled, the log of the softmax and the cap's tanh."""
    held = at.compute_bytes if at.compiled else FP32 * (1 if at.model.softcap is None else 2)
    return _tokens(at) * at.model.lm_head_rows * held + _cast(at)


def _reference_beyond(at: Kept) -> float:
    """Gradients of the logits."""
    return _tokens(at) * at.model.lm_head_rows * (at.compute_bytes if at.compiled else 2 * FP32)


def _chunk(at: Kept, usual_tokens: int) -> int:
    """Logits that exist at once."""
    return at.model.lm_head_rows * min(_tokens(at), at.lm_head_chunk_tokens or usual_tokens)


def _chunked_beyond(at: Kept) -> float:
    c = at.compute_bytes
    logits = _chunk(at, head_chunk_tokens(at.model.lm_head_rows))
    return (3 * FP32 + c) * logits + (FP32 + c) * _matrix(at) + c * _tokens(at) * at.model.width


def _fused_kept(at: Kept) -> float:
    """It makes the gradients in the forward pass and keeps them."""
    return at.compute_bytes * (_tokens(at) * at.model.width + _matrix(at))


def _fused_beyond(at: Kept) -> float:
    c = at.compute_bytes
    return c * _chunk(at, FUSED_CHUNK_TOKENS) + (FP32 + c) * _matrix(at) + _cast(at)


BACKENDS = (
    custom_backend(
        _by_chunks("kernels.head_loss_fused", "head_loss_fused"),
        kept=_fused_kept,
        beyond=_fused_beyond,
        short_chunk_tokens=2_048,  # 0.2 GiB of logits at 50,304 rows
    ),
    Backend(
        name="chunked",
        build=_by_chunks("kernels.head_loss", "head_loss_chunked"),
        pays_not=_chunks_pay_not,
        reason=_chunked_reason,
        kept=_cast,
        beyond=_chunked_beyond,
        short_chunk_tokens=1_024,  # 0.7 GiB, in fp32 and more than once
    ),
    Backend(
        name="reference",
        build=imported("model.loss", "head_loss"),
        why_not=_chunks_without_use,
        misfit=_chunks_without_use,
        reason=lambda _: "the compiler fuses cap and loss",
        kept=_reference_kept,
        beyond=_reference_beyond,
    ),
)
