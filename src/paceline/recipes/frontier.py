"""The newest techniques as presets for one GPU: each is its predecessor plus what changed."""

from collections.abc import Callable
from dataclasses import replace

from paceline.recipes.records import r18_softcap
from paceline.settings.data import BatchConfig
from paceline.settings.model import LayerOverride, ModelConfig, NgramConfig, WindowConfig
from paceline.settings.optim import AverageConfig, GroupConfig, OptimConfig, ScheduleConfig
from paceline.settings.run import RunConfig
from paceline.settings.schedule import Stage

LAYERS = tuple(range(11))
SEQUENCE = 65_536
PREDECESSORS = {"frontier-60": "r18-softcap"}


def frontier_60() -> RunConfig:
    """Towards a validation loss of 3.3128 on the en-140M track in the least time: small batches first, attention in 7
    of 11 layers, a sampled softmax, n-gram tables, NorMuon, averaged weights."""
    base = r18_softcap()
    return replace(
        base,
        preset="frontier-60",
        steps=600,
        model=_model(base.model),
        optim=_optim(base.optim),
        batch=BatchConfig(tokens=131_072, sequence_tokens=SEQUENCE, micro_tokens=SEQUENCE),
        stages=(
            Stage(share=0.4, batch_tokens=65_536, lr=0.7, window_tokens=128, long_window_tokens=384),
            Stage(share=0.4, window_tokens=384, long_window_tokens=896),
            Stage(share=0.13, window_tokens=640, long_window_tokens=1_408),
            Stage(share=0.07, window_tokens=640, long_window_tokens=1_408, candidates=0),
        ),
    )


def _model(base: ModelConfig) -> ModelConfig:
    return replace(
        base,
        num_layers=11,
        layers_without_attention=(4, 6, 7, 9),
        layer_overrides=(
            LayerOverride(layers=LAYERS, mlp_width=2_816, score_scale=0.1),
            LayerOverride(layers=(7,), mlp_width=0),
            LayerOverride(layers=(8,), mlp_width=5_632),
            LayerOverride(layers=(3, 10), window="long", key_offset=True),
            LayerOverride(layers=(8, 10), attends_to=7),
            LayerOverride(layers=(0, 1, 2, 4, 5, 7), x0_gate=True),
            LayerOverride(layers=(1, 4, 5, 9, 10), ngram_gate=True),
        ),
        qk_matrix_heads=2,
        matrix_init="half",
        attention_output_starts=True,
        attention_branch_scale=0.5,
        residual_scales=True,
        norm_eps=2.0**-23,
        qk_norm_eps=2.0**-23,
        tied_lm_head=True,
        embedding_init="small",
        x0_mix=False,
        unet_skips=False,
        skip=(3, 6),
        backout_layer=7,
        ngrams=NgramConfig(bigram_rows=1 << 22, trigram_rows=1 << 22),
        value_path="listed",
        value_layers=(1, 2, 8, 10),
        value_gates=True,
        value_init_std=0.01,
        candidates=12_288,
        window=WindowConfig(unit="blocks", start_tokens=128, growth_tokens=0, quantum_tokens=128),
        long_window=WindowConfig(unit="blocks", start_tokens=384, growth_tokens=0, quantum_tokens=128),
    )


def _optim(base: OptimConfig) -> OptimConfig:
    muon = replace(
        base.muon,
        lr=0.032,
        momentum_warmup_steps=0,
        momentum_warmup_share=0.2,
        momentum_cooldown_share=0.04,
        ns_maps="polar_express",
        row_beta2=0.9,
        mlp_output_rate=4.0,
        weight_decay=0.6,
        cautious_decay=True,
    )
    return replace(
        base,
        muon=muon,
        adam=replace(base.adam, embedding_lr=0.6, beta1=0.9, beta2=0.99, eps=1e-15),
        groups=(
            GroupConfig(name="embeddings", lr=0.008, beta1=0.5, beta2=0.95),
            GroupConfig(name="value_embeddings", beta1=0.75, beta2=0.95),
            GroupConfig(name="ngrams", beta2=0.95, weight_decay=0.014),
        ),
        schedule=ScheduleConfig(cooldown_share=0.6, floor=0.15),
        average=AverageConfig(tau_share=0.1, start_share=0.7, blend=0.5, groups=("matrices", "embeddings")),
    )


MAKERS = (frontier_60,)
FRONTIER: dict[str, Callable[[], RunConfig]] = {make.__name__.replace("_", "-"): make for make in MAKERS}
