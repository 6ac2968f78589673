"""Who computes what: the back end of each seam of the model, by the settings, the machine and the model itself."""

from dataclasses import dataclass

from paceline.core.probe import Choice, choose_attention, choose_fused, choose_head, choose_packed
from paceline.model.attention import WINDOW_ON_HOST, heads_misfit, packed_misfit, ranges_misfit
from paceline.train.config import RunConfig


@dataclass(frozen=True)
class BackEnds:
    """By the names that the settings use."""

    attention: Choice
    heads: Choice
    mlp: Choice
    head: Choice
    muon: Choice
    """Newton–Schulz; no setting names it, `train.fast_paths` decides."""

    @property
    def window_on_host(self) -> bool:
        """Whether attention wants its window as a tensor on the host instead of the device."""
        return self.attention.name in WINDOW_ON_HOST


def choose_back_ends(config: RunConfig, device: str, products: str) -> BackEnds:
    """`products` is the format of products on this device. Nothing is allocated."""
    model, own = config.model, config.train.fast_paths
    format_misfit = None if products == "bf16" else f"it computes in bf16, not {products}"
    return BackEnds(
        attention=_attention(config, device, format_misfit),
        heads=choose_fused(
            "--attention.heads", config.attention.heads, device, own=own, misfit=format_misfit or heads_misfit(model)
        ),
        mlp=choose_fused(
            "--mlp.backend", config.mlp.backend, device, own=own, misfit=format_misfit or _mlp_misfit(config)
        ),
        head=choose_head(
            config.head.backend,
            device,
            compiled=config.train.compile,
            own=own,
            misfit=format_misfit,
            chunks=config.head.chunk_tokens is not None,
        ),
        muon=choose_fused("--train.fast-paths", "auto", device, own=own, misfit=format_misfit),
    )


def _attention(config: RunConfig, device: str, format_misfit: str | None) -> Choice:
    asked, model = config.attention, config.model
    if asked.backend in WINDOW_ON_HOST:
        misfit = packed_misfit(model) or format_misfit
        if misfit is None and config.train.deterministic:
            misfit = "its backward pass adds in an order that changes, and --train.deterministic is on"
        return choose_packed(asked.backend, device, misfit=misfit, fa3_library=asked.fa3_library)
    return choose_attention(
        asked.backend,
        device,
        compiled=config.train.compile,
        head_dim=model.head_dim,
        own=config.train.fast_paths,
        misfit=format_misfit or ranges_misfit(model),
    )


def _mlp_misfit(config: RunConfig) -> str | None:
    """Why the fused MLP does not know this model, or None."""
    if config.model.activation != "relu2":
        return f"it knows relu2 only, not --model.activation {config.model.activation}"
    if config.model.width % 8:
        return f"--model.width {config.model.width} is not a multiple of 8, which the copy engine needs"
    return None
