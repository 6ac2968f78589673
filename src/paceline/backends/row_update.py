"""Who updates tables by their row gradients. No torch; what is built is an `optim.rule.UpdateRows`."""

from paceline.backends.registry import Backend, custom_backend, imported

BACKENDS = (
    custom_backend(imported("kernels.row_update", "update_rows")),
    Backend(name="reference", build=imported("optim.rules.adam_rows", "update_plainly")),
)
