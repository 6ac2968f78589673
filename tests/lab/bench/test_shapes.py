"""The products of a step, and the GPU's answers."""

from dataclasses import replace

import pytest

from paceline.lab.bench.gemm import products_of
from paceline.lab.bench.gpu_telemetry import read_answers
from paceline.recipes.presets import PRESETS, preset
from paceline.settings.schedule import Stage, mean_batch_tokens
from paceline.settings.spec import describe

ATTENTION = "attention query, attention key, attention value, attention output"


def test_the_products_of_record_18() -> None:
    found = {(p.name, p.kind): p for p in products_of(preset("r18-softcap"))}
    head, up, qkv = found["head", "forward"], found["mlp up", "grad weight"], found[ATTENTION, "grad input"]
    assert (head.rows, head.depth, head.columns, head.calls) == (65_536, 768, 50_304, 8)
    assert (up.rows, up.depth, up.columns, up.calls) == (3_072, 65_536, 768, 12 * 8)
    assert (qkv.rows, qkv.depth, qkv.columns, qkv.calls) == (65_536, 768, 768, 4 * 11 * 8)


@pytest.mark.parametrize("name", list(PRESETS))
@pytest.mark.parametrize("kv_heads", [None, 1])
def test_products_cost_six_operations_per_weight_and_token(name: str, kv_heads: int | None) -> None:
    config = preset(name)
    if kv_heads is not None and config.model.qkv == "separate" and config.model.qk_matrix_heads is None:
        config = replace(config, model=replace(config.model, num_kv_heads=kv_heads))
    weights = describe(config.model).numel("matrices") + config.model.lm_head_rows * config.model.width
    flops = sum(p.flops * p.calls for p in products_of(config))
    assert flops == pytest.approx(6 * weights * mean_batch_tokens(config), rel=1e-12)


def test_of_a_run_in_stages_products_are_counted_for_the_mean_step() -> None:
    """Half of the steps have half of the tokens; the largest batch decides the micro-batch."""
    config = preset("r18-softcap")
    stages = (Stage(share=0.5, batch_tokens=config.batch.tokens // 2), Stage(share=0.5))
    weights = describe(config.model).numel("matrices") + config.model.lm_head_rows * config.model.width
    found = products_of(replace(config, stages=stages))
    assert sum(p.flops * p.calls for p in found) == 6 * weights * config.batch.tokens * 3 / 4
    assert {min(p.rows, p.depth, key=lambda side: abs(side - 65_536)) for p in found} == {65_536}


def test_clock_and_power_are_medians_of_the_answers_that_are_numbers() -> None:
    answers = ["1980, 690.5", None, "1500, 650.5", "1755, [N/A]"]
    assert read_answers(answers) == {"sm_clock_mhz": 1755.0, "power_w": 670.5}
    assert read_answers([None, "No devices were found"]) == {"sm_clock_mhz": None, "power_w": None}
