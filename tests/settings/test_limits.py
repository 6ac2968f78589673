"""The last value that a setting takes and the first that it does not, of every setting with a limit."""

import math
from dataclasses import replace
from typing import Any

import pytest

from paceline.core.errors import ConfigError
from paceline.recipes.presets import preset
from paceline.settings.backends import LmHeadConfig
from paceline.settings.data import BatchConfig, DataConfig
from paceline.settings.limits import Limited, _limits
from paceline.settings.model import ModelConfig, NgramConfig, RotaryConfig, WindowConfig
from paceline.settings.optim import AdamConfig, AverageConfig, GroupConfig, MuonConfig, OptimConfig, ScheduleConfig
from paceline.settings.parallel import ParallelConfig, SlurmConfig
from paceline.settings.run import (
    BadStepsConfig,
    CheckpointConfig,
    EvaluateConfig,
    MetricsConfig,
    RunConfig,
    TrainConfig,
)
from paceline.settings.schedule import Stage

TINY, BELOW_1, ABOVE_1 = 5e-324, math.nextafter(1, 0), math.nextafter(1, 2)
COUNT, FROM_0, POSITIVE = ([1], [0, -1]), ([0], [-1]), ([TINY], [0.0, -1.0])
RATE = ([0.0, TINY, 1e300], [-TINY, math.inf, math.nan])
BETA = ([0.0, BELOW_1], [-TINY, 1.0, math.nan])
SHARE = ([TINY, 1.0], [0.0, ABOVE_1, math.nan])
UNIT = ([0.0, 1.0], [-TINY, ABOVE_1, math.nan])
FINITE_POSITIVE = ([TINY], [0.0, math.inf, math.nan])
EPS = ([0.0, TINY], [-TINY, math.inf, math.nan])
LIMITS: dict[type[Limited], dict[str, tuple[list[Any], list[Any]]]] = {
    RotaryConfig: {"base": ([ABOVE_1], [1.0, math.inf]), "rotary_fraction": SHARE, "max_tokens": COUNT},
    ModelConfig: {
        "vocab_size": COUNT, "embedding_multiple": COUNT, "lm_head_multiple": COUNT, "width": ([], [0]),
        "num_layers": COUNT, "num_heads": ([], [0]), "num_kv_heads": COUNT, "head_dim": ([], [0]), "mlp_ratio": COUNT,
        "qk_matrix_heads": ([1], [0]),
        "attention_branch_scale": ([0.0, -1.0], [math.inf, math.nan]), "norm_eps": EPS, "qk_norm_eps": EPS,
        "softcap": FINITE_POSITIVE, "softcap_shift": ([0.0], [math.inf, math.nan]), "candidates": COUNT,
        "dropout": BETA, "value_init_std": RATE,
    },
    NgramConfig: {"bigram_rows": ([2], [1]), "trigram_rows": ([2], [1]), "sign_rows": COUNT},
    WindowConfig: {
        "start_tokens": ([1 << 30], [1 + (1 << 30)]), "growth_tokens": ([1 << 30], [1 + (1 << 30)]),
        "quantum_tokens": ([128], [1 + (1 << 30)]),
    },
    LmHeadConfig: {"chunk_tokens": COUNT},
    DataConfig: {"end_of_text": FROM_0},
    BatchConfig: {"tokens": ([], [0]), "sequence_tokens": COUNT},
    MuonConfig: {
        "lr": RATE, "momentum": BETA, "momentum_start": BETA, "momentum_warmup_steps": FROM_0, "ns_steps": COUNT,
        "momentum_warmup_share": SHARE, "momentum_cooldown_share": UNIT,
        "weight_decay": RATE, "row_beta2": BETA, "mlp_output_rate": FINITE_POSITIVE,
    },
    AdamConfig: {
        "embedding_lr": RATE, "lm_head_lr": RATE, "scalar_lr": RATE, "matrix_lr": RATE, "vector_lr": RATE,
        "gate_lr": RATE, "mix_lr": RATE, "ngram_lr": RATE, "beta1": BETA, "beta2": BETA,
        "eps": POSITIVE, "weight_decay": RATE,
    },
    ScheduleConfig: {"warmup_steps": FROM_0, "cooldown_steps": ([], [0]), "cooldown_share": SHARE, "floor": UNIT},
    GroupConfig: {"lr": RATE, "beta1": BETA, "beta2": BETA, "eps": RATE, "weight_decay": RATE, "every": COUNT},
    AverageConfig: {
        "tau_steps": FINITE_POSITIVE, "tau_share": ([], [0.0, math.inf]), "start_share": UNIT, "blend": UNIT,
    },
    OptimConfig: {"clip_norm": POSITIVE},
    ParallelConfig: {"context_parallel": COUNT, "timeout_s": POSITIVE, "start_timeout_s": POSITIVE},
    SlurmConfig: {"nodes": COUNT, "gpus": FROM_0, "cpus_per_rank": COUNT, "minutes": COUNT},
    TrainConfig: {
        "untimed_steps": FROM_0, "memory_limit_gib": FINITE_POSITIVE, "threads": ([1, 1024], [0, 1025]),
        "stop_after": COUNT,
    },
    BadStepsConfig: {"spike": FINITE_POSITIVE, "limit": COUNT},
    EvaluateConfig: {"every": COUNT, "tokens": FROM_0},
    CheckpointConfig: {"every": COUNT, "keep": ([2], [1, 0])},
    MetricsConfig: {"every": COUNT, "wandb": (["a"], [""]), "trackio": (["a"], [""])},
    RunConfig: {"steps": ([], [0]), "seed": ([0, 2**63 - 1], [-1, 2**63])},
    Stage: {
        "share": SHARE, "batch_tokens": COUNT, "lr": ([0.0], [-TINY]), "window_tokens": COUNT,
        "long_window_tokens": COUNT, "candidates": FROM_0,
    },
}  # fmt: skip
NEEDED: dict[type[Limited], Limited] = {
    BatchConfig: BatchConfig(tokens=1, sequence_tokens=1),
    GroupConfig: GroupConfig(name="scalars"),
    RunConfig: preset("demo"),
    Stage: Stage(share=1.0),
}
"""Of what has no defaults."""
ROWS = [(kind, name, *values) for kind, fields in LIMITS.items() for name, values in fields.items()]


def test_the_table_has_every_setting_with_a_limit() -> None:
    def all_kinds(kind: type) -> set[type]:
        return {kind}.union(*map(all_kinds, kind.__subclasses__()))

    ours = {kind for kind in all_kinds(Limited) if kind.__module__.startswith("paceline.settings.")} - {Limited}
    assert {kind: set(_limits(kind)) for kind in ours if _limits(kind)} == {
        kind: set(fields) for kind, fields in LIMITS.items()
    }


@pytest.mark.parametrize(
    ("kind", "name", "taken", "refused"), ROWS, ids=[f"{kind.__name__}.{name}" for kind, name, *_ in ROWS]
)
def test_a_limit_is_where_it_is_said_to_be(
    kind: type[Limited], name: str, taken: list[Any], refused: list[Any]
) -> None:
    base = NEEDED.get(kind) or kind()
    for value in taken:
        assert getattr(replace(base, **{name: value}), name) == value  # type: ignore[type-var]
    flag = name.replace("_", "-") if kind.prefix.startswith("--") else name
    for value in refused:
        with pytest.raises(ConfigError) as caught:
            replace(base, **{name: value})  # type: ignore[type-var]
        assert str(caught.value).startswith(f"{kind.prefix}{flag} {value}")
