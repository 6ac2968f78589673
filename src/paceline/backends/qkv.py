"""Who computes queries, keys and values and what surrounds attention. No torch."""

from paceline.backends.registry import FP32, Backend, Kept, Request, custom_backend, imported


def misfit(request: Request) -> str | None:
    model = request.model
    if model.biases or model.positions != "rotary":
        return "it knows rotary positions without biases only"
    if model.qk_norm != "before_rotary":
        return f"it knows a norm before the rotary only, not --model.qk-norm {model.qk_norm}"
    scalars = model.value_lambdas if model.value_path != "plain" and not model.value_gates else 2
    if model.value_path == "residual" or scalars != 2:
        return f"it knows value tables by two scalars or gates only, not --model.value-path {model.value_path}"
    for shape in model.attending:
        if shape.qk_dim & (shape.qk_dim - 1) or shape.qk_dim != shape.v_dim:
            return f"--model.head-dim {shape.qk_dim} is not a power of two, or not that of the values"
    return None


def _before_mix(at: Kept) -> int:
    return at.compute_bytes * at.attention.v_width if at.model.value_path != "plain" else 0


def _fused_kept(at: Kept) -> float:
    """Norms are undone from their results and scales."""
    return _before_mix(at) + FP32 * (at.attention.num_heads + at.attention.kv_heads)


def _reference_kept(at: Kept) -> float:
    """From the projections to what attention takes; the latter is counted there."""
    c, model = at.compute_bytes, at.model
    queries_and_keys = at.attention.q_width + at.attention.k_width
    before_norm = 0 if model.qk_norm == "none" else (c if at.compiled else FP32) * queries_and_keys
    if at.compiled:
        return _before_mix(at) + before_norm
    stream = FP32 if model.precision.mode == "autocast" else c
    if model.qkv == "fused" and model.positions == "learned":  # all three are views of it
        return _before_mix(at) + before_norm
    if model.qkv == "fused":  # the values are a view of the joined projection, which they keep alive
        before_norm = max(before_norm, c * queries_and_keys)
    elif stream != c:  # each projection casts the stream for itself
        before_norm += 2 * c * model.width
    return _before_mix(at) + before_norm


BACKENDS = (
    custom_backend(imported("backends.fused", "attention_fused"), misfit, kept=_fused_kept),
    Backend(name="reference", build=imported("model.attention", "attention_plain"), kept=_reference_kept),
)
