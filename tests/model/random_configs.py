"""Small models with random switches and layers of different shapes."""

from hypothesis import assume
from hypothesis import strategies as st

from paceline.core.errors import ConfigError
from paceline.settings.model import LayerOverride, ModelConfig, PrecisionConfig, RotaryConfig, WindowConfig

SWITCHES: dict[str, st.SearchStrategy[object]] = {
    "embedding_multiple": st.sampled_from([1, 16]),
    "lm_head_multiple": st.sampled_from([1, 16]),
    "num_kv_heads": st.sampled_from([None, 1, 2]),
    "mlp_ratio": st.integers(1, 4),
    "qkv": st.sampled_from(["fused", "separate"]),
    "zero_init_outputs": st.booleans(),
    "tied_lm_head": st.booleans(),
    "x0_mix": st.booleans(),
    "unet_skips": st.booleans(),
    "value_path": st.sampled_from(["plain", "residual", "layerwise", "mirrored", "sparse"]),
    "value_ends": st.just(1),
    "value_lambdas": st.sampled_from([1, 2]),
    "value_storage": st.sampled_from(["tables", "chunks"]),
    "document_mask": st.booleans(),
    "precision": st.builds(
        PrecisionConfig,
        embeddings=st.sampled_from(["fp32", "bf16"]),
        scalars=st.sampled_from(["fp32", "bf16"]),
        round_matrices_at_init=st.booleans(),
    ),
}
CHANGES: dict[str, st.SearchStrategy[object]] = {
    "attention": st.booleans(),
    "qk_dim": st.sampled_from([2, 4, 6]),
    "v_dim": st.integers(1, 5),
    "window": st.sampled_from(["short", "long"]),
    "mlp_width": st.sampled_from([0, 3, 8]),
}


@st.composite
def model_configs(draw: st.DrawFn) -> ModelConfig:
    layers = draw(st.integers(1, 4))
    overrides = []
    for _ in range(draw(st.integers(0, 2))):
        which = draw(st.lists(st.integers(-layers, layers - 1), min_size=1, max_size=layers, unique=True))
        overrides.append(LayerOverride(layers=tuple(which), **draw(st.fixed_dictionaries({}, optional=CHANGES))))  # type: ignore[arg-type]
    switches = draw(st.fixed_dictionaries({}, optional=SWITCHES))
    try:
        return ModelConfig(
            vocab_size=17,
            width=8,
            num_layers=layers,
            num_heads=2,
            head_dim=4,
            rotary=RotaryConfig(max_tokens=8),
            window=WindowConfig(unit="tokens", start_tokens=2, growth_tokens=0, quantum_tokens=1),
            long_window=WindowConfig(unit="tokens", start_tokens=4, growth_tokens=0, quantum_tokens=1),
            layers_without_attention=tuple(draw(st.lists(st.integers(0, layers - 1), max_size=1))),
            layer_overrides=tuple(overrides),
            **switches,  # type: ignore[arg-type]
        )
    except ConfigError:  # two choices that exclude each other
        assume(False)
        raise
