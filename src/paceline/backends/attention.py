"""Who computes attention. No torch; `attention_plans.py` holds what is built."""

from collections.abc import Callable
from itertools import pairwise

from paceline.backends.registry import FP32, Backend, Kept, Request, after_probe, imported, nothing
from paceline.core import probe
from paceline.settings.backends import CHUNK_TOKENS, chunk_reach
from paceline.settings.model import ModelConfig

FLEX_HEAD_DIM = 16
"""FlexAttention's narrowest head."""


def _only_causal(model: ModelConfig) -> bool:
    return model.window.unit == "none" and not model.document_mask


def _ranges_misfit(request: Request) -> str | None:
    """Why our kernel does not know such a model, or None."""
    if request.compute != "bf16":
        return f"it computes in bf16, not {request.compute}"
    if _only_causal(request.model):
        return "a plainly causal mask is left to PyTorch's own kernel"
    for shape in request.model.attending:
        if shape.qk_dim != shape.v_dim:
            return f"it knows one width of heads, not queries of {shape.qk_dim} with values of {shape.v_dim}"
        if shape.qk_dim not in (64, 128):
            return f"it knows heads of 64 and 128, not --model.head-dim {shape.qk_dim}"
    return None


def _ranges_against(request: Request) -> str | None:
    if (misfit := _ranges_misfit(request)) is not None or probe.own_kernels(request.device).usable:
        return misfit
    from paceline.backends.ranges import failed_trial

    return failed_trial(max(shape.qk_dim for shape in request.model.attending))


def _flex_misfit(request: Request) -> str | None:
    narrow = [s.qk_dim for s in request.model.attending if s.qk_dim < FLEX_HEAD_DIM]
    return f"FlexAttention has no kernel for --model.head-dim {min(narrow)}, below {FLEX_HEAD_DIM}" if narrow else None


def _flex_why_not(request: Request) -> str | None:
    return _flex_misfit(request) or after_probe(probe.flex_attention, nothing)(request)


def _flex_pays_not(request: Request) -> str | None:
    """Uncompiled, FlexAttention holds all T² scores."""
    return None if request.compiled else "FlexAttention pays only in compiled code; see --train.compile"


def _reference_reason(request: Request) -> str:
    return _flex_why_not(request) or _flex_pays_not(request) or "plain PyTorch"


def _packed_misfit(request: Request) -> str | None:
    if request.model.window.unit in ("blocks", "tokens_in_blocks"):
        return f"it counts a window in tokens from the query back, not --model.window.unit {request.model.window.unit}"
    if (misfit := _ranges_misfit(request)) is not None:
        return misfit
    if request.deterministic:
        return "its backward pass adds in an order that changes, and --train.deterministic is on"
    return None


def _flash_kept(at: Kept) -> float:
    """Queries, keys, values, result and the logarithm of its denominator."""
    s = at.attention
    return at.compute_bytes * (s.q_width + s.k_width + s.v_width + s.out_width) + FP32 * s.num_heads


def _reference_kept(at: Kept) -> float:
    """The same, the mask as numbers, and what is held more than once."""
    if _only_causal(at.model):
        return _flash_kept(at)
    s, c = at.attention, at.compute_bytes
    masked_keys, key_copies, result_copies = _reference_copies(at)
    masks = 1.0 if at.model.document_mask else 1 / at.micro_sequences  # of each sequence, or one for all
    repeated = s.num_heads * (s.qk_dim + s.v_dim)  # keys and values are repeated for their query heads
    held = s.q_width + key_copies * repeated + result_copies * s.out_width
    return c * held + FP32 * s.num_heads + c * masked_keys * masks


def _reference_copies(at: Kept) -> tuple[float, float, float]:
    """Keys that a query is masked against, and how often keys (and values) and results are held."""
    tokens = at.sequence_tokens
    if (reach := chunk_reach(at.model, tokens, at.attention.window)) is None:
        ends = [min(first + CHUNK_TOKENS, tokens) for first in range(0, tokens, CHUNK_TOKENS)]
        rows = [end - start for start, end in pairwise([0, *ends])]
        masked = sum(n * end for n, end in zip(rows, ends, strict=True)) / tokens  # rows see the keys before their end
        return masked, 1.0, 2.0  # results are put together
    keys = reach + CHUNK_TOKENS
    overlap = keys / CHUNK_TOKENS if at.micro_sequences > 1 else 1 + reach / tokens  # alone: views
    return keys, overlap, 1.0


def _packed(name: str, version: int, probed: Callable[[str], probe.Verdict], capability: int | None = None) -> Backend:
    """FlashAttention of a version over packed documents."""
    plan_packed = imported("backends.attention_plans", "plan_packed")
    return Backend(
        name=name,
        build=lambda request: plan_packed(request)(version),
        why_not=after_probe(probed, _packed_misfit),
        misfit=_packed_misfit,
        capability=capability,
        kept=_flash_kept,
        automatic=False,
        windows_on_host=True,
    )


BACKENDS = (
    Backend(
        name="ranges",
        build=imported("backends.attention_plans", "plan_ranges"),
        why_not=after_probe(lambda device: probe.ranges_attention(device), _ranges_against),
        misfit=_ranges_misfit,
        reason=lambda request: f"our kernel; {probe.ranges_attention(request.device).reason}",
        kept=_flash_kept,
        custom=True,
    ),
    Backend(
        name="flex",
        build=imported("backends.attention_plans", "plan_flex"),
        why_not=_flex_why_not,
        misfit=_flex_misfit,
        pays_not=_flex_pays_not,
        reason=lambda _: "FlexAttention, compiled",
        kept=_flash_kept,
    ),
    _packed("varlen", 2, lambda device: probe.varlen_attention(device)),
    _packed("fa3", 3, lambda device: probe.flash_attention_3(device), probe.HOPPER),
    Backend(
        name="reference",
        build=imported("model.attention", "plan_reference"),
        reason=_reference_reason,
        kept=_reference_kept,
    ),
)
