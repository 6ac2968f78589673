"""Who computes Muon's iteration. No torch; what is built takes the place of `newton_schulz.orthogonalise`."""

from typing import Any

from paceline.backends.registry import Backend, Request, custom_backend, imported


def _reference(request: Request) -> Any:
    import torch

    from paceline.optim.newton_schulz import orthogonalise

    return torch.compile(orthogonalise, fullgraph=True, dynamic=False) if request.compiled else orthogonalise


BACKENDS = (
    custom_backend(imported("backends.newton_schulz_fused", "orthogonalise_symmetric")),
    Backend(name="reference", build=_reference),
)
