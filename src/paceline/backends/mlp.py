"""Who computes the MLPs. No torch."""

from paceline.backends.registry import Backend, Kept, Request, custom_backend, imported


def misfit(request: Request) -> str | None:
    model = request.model
    if model.activation != "relu2":
        return f"it knows relu2 only, not --model.activation {model.activation}"
    if model.biases:
        return "it knows no --model.biases"
    if model.width % 8:
        return f"--model.width {model.width} is not a multiple of 8, which the copy engine needs"
    for layer in model.layers:
        if layer.mlp_width % 8:
            return f"the MLP of layer {layer.index} is {layer.mlp_width} wide, which is not a multiple of 8"
    return None


def _hidden(at: Kept) -> float:
    assert at.layer is not None
    return float(at.compute_bytes * at.layer.mlp_width)


def _reference_kept(at: Kept) -> float:
    """The activated values, or what they come from; uncompiled, both. With a gate, two of each."""
    return (1 if at.compiled else 2) * (2 if at.model.gated else 1) * _hidden(at)


BACKENDS = (
    # the activated values, from which the slope follows
    custom_backend(imported("backends.fused", "mlp_fused"), misfit, kept=_hidden),
    Backend(name="reference", build=imported("model.block", "mlp_plain"), kept=_reference_kept),
)
