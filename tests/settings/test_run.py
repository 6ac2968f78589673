"""Settings of loop, records and rates that cannot work are refused with their flag."""

import math
from dataclasses import replace

import pytest

from paceline.core.errors import ConfigError
from paceline.recipes.presets import preset
from paceline.settings.optim import AdamConfig, MuonConfig
from paceline.settings.parallel import ParallelConfig
from paceline.settings.run import MetricsConfig, TrainConfig


@pytest.mark.parametrize(
    ("config", "field", "value"),
    [
        (MetricsConfig(), "every", 0),
        (TrainConfig(), "threads", 0),
        (TrainConfig(), "threads", 5000),
        (TrainConfig(), "untimed_steps", -1),
        (TrainConfig(), "stop_after", 0),
        (MuonConfig(), "lr", -0.1),
        (MuonConfig(), "lr", math.nan),
        (MuonConfig(), "weight_decay", math.inf),
        (MuonConfig(), "momentum_warmup_steps", -1),
        (AdamConfig(), "embedding_lr", -1.0),
        (AdamConfig(), "lm_head_lr", math.nan),
        (AdamConfig(), "weight_decay", -0.1),
        (AdamConfig(), "eps", math.nan),
    ],
)
def test_a_setting_that_cannot_work_is_refused_with_its_flag(config: object, field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=field.replace("_", "-")):
        replace(config, **{field: value})  # type: ignore[type-var]


@pytest.mark.parametrize(
    ("parallel", "flag"),
    [(ParallelConfig(fsdp=True), "--parallel.fsdp"),
     (ParallelConfig(context_parallel=2), "--parallel.context-parallel 2")],
)  # fmt: skip
def test_instruments_and_passes_of_several_ranks_exclude_each_other(parallel: ParallelConfig, flag: str) -> None:
    record = replace(preset("r18-softcap"), parallel=parallel)
    with pytest.raises(ConfigError, match=f"--metrics.diagnostics .* {flag} leaves on no rank"):
        replace(record, metrics=replace(record.metrics, diagnostics=True))
