"""The products of a step, and the GPU's answers."""

from dataclasses import replace

import pytest

from paceline.lab.bench.gemm import products_of
from paceline.lab.bench.gpu_telemetry import read_answers
from paceline.recipes.presets import PRESETS, preset
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
    if kv_heads is not None and config.model.qkv == "separate":
        config = replace(config, model=replace(config.model, num_kv_heads=kv_heads))
    weights = describe(config.model).numel("matrices") + config.model.lm_head_rows * config.model.width
    assert sum(p.flops * p.calls for p in products_of(config)) == 6 * weights * config.batch.tokens


def test_clock_and_power_are_medians_of_the_answers_that_are_numbers() -> None:
    answers = ["1980, 690.5", None, "1500, 650.5", "1755, [N/A]"]
    assert read_answers(answers) == {"sm_clock_mhz": 1755.0, "power_w": 670.5}
    assert read_answers([None, "No devices were found"]) == {"sm_clock_mhz": None, "power_w": None}
