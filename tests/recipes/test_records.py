"""The record presets against the facts of the public runs: every number, every schedule, every difference."""

import math
from typing import Any
from unittest.mock import ANY  # a setting that the record does not have, or whose value no source tells

import pytest

from paceline.core.schema import changes, flatten
from paceline.recipes.presets import PRESETS, preset
from paceline.recipes.records import PUBLIC
from paceline.recipes.records import RECORDS as ALL_RECORDS
from paceline.settings.schedule import cooldown_steps_of, lr_scale, muon_momentum

RECORDS = list(ALL_RECORDS)
R04, R05, R13, R14, R15, R16, R17, R18 = RECORDS
BF16, FP32 = 2.0**-7, 2.0**-23

#   field                               #4      #5      #13     #14     #15     #16     #17     #18
FACTS: dict[str, tuple[Any, ...]] = {
    "steps":                           (6200,   5100,   1750,   1530,   1480,   1480,   1490,   1390),
    "batch.tokens":                    (524288, 524288, 524288, 524288, 524288, 524288, 524288, 524288),
    "batch.sequence_tokens":           (1024,   1024,   65536,  65536,  65536,  65536,  65536,  65536),
    "model.vocab_size":                (50257,  50257,  50257,  50257,  50257,  50257,  50257,  50257),
    "model.width":                     (768,    768,    768,    768,    768,    768,    768,    768),
    "model.num_layers":                (12,     12,     12,     12,     12,     12,     12,     12),
    "model.num_heads":                 (12,     6,      6,      6,      6,      6,      6,      6),
    "model.num_kv_heads":              (None,   None,   None,   None,   None,   None,   None,   None),
    "model.head_dim":                  (64,     128,    128,    128,    128,    128,    128,    128),
    "model.mlp_ratio":                 (4,      4,      4,      4,      4,      4,      4,      4),
    "model.qkv":                       ("fused", *["separate"] * 7),
    "model.activation":                ("gelu", *["relu2"] * 7),
    "model.zero_init_outputs":         (False,  True,   True,   True,   True,   True,   True,   True),
    "model.attention_branch_scale":    (1 / math.sqrt(24), *[1.0] * 7),
    "model.norm_eps":                  (1e-6,   FP32,   BF16,   BF16,   BF16,   BF16,   BF16,   BF16),
    "model.qk_norm":                   ("none", "after_rotary", *["before_rotary"] * 6),
    "model.qk_norm_eps":               (ANY,    BF16,   BF16,   BF16,   BF16,   BF16,   BF16,   BF16),
    "model.rotary.base":               (1e4,    1e4,    1e4,    1e4,    1e4,    1e4,    1024.0, 1024.0),
    "model.rotary.rotary_fraction":      (1.0,    1.0,    1.0,    1.0,    1.0,    1.0,    0.5,    0.5),
    "model.rotary.spacing":            (*["open"] * 6, "closed", "closed"),
    "model.rotary.frequency_dtype":    ("fp32", "fp32", "fp32", "bf16", "bf16", "bf16", "fp32", "fp32"),
    "model.rotary.table_dtype":        ("fp32", *["bf16"] * 6, "fp32"),
    "model.rotary.arithmetic":         (ANY, *["activation"] * 5, "fp32", "fp32"),
    "model.rotary.max_tokens":         (1024,   1024,   65536,  65536,  65536,  65536,  65536,  65536),
    "model.tied_lm_head":                 (True,   True,   False,  False,  False,  False,  False,  False),
    "model.embedding_init":            ("uniform", "uniform", *["normal"] * 6),
    "model.lm_head_init":                 (ANY,    ANY,    *["zeros"] * 6),
    "model.embedding_norm":            (False,  False,  True,   True,   True,   True,   True,   True),
    "model.x0_mix":                    (False,  False,  True,   True,   True,   True,   True,   True),
    "model.unet_skips":                (False,  False,  True,   True,   True,   True,   True,   True),
    "model.value_path":                ("plain", "plain", "residual", "layerwise", "mirrored", "mirrored", "sparse",
                                        "sparse"),
    "model.value_ends":                (ANY,    ANY,    ANY,    ANY,    ANY,    ANY,    3,      3),
    "model.value_lambdas":             (ANY,    ANY,    1,      1,      2,      2,      2,      2),
    "model.value_storage":             (ANY,    ANY,    ANY,    "chunks", "chunks", "tables", "tables", "tables"),
    "model.layers_without_attention":  ((),     (),     (),     (),     (),     (),     (7,),   (7,)),
    "model.softcap":                   (None,   None,   30.0,   30.0,   30.0,   30.0,   30.0,   15.0),
    "model.document_mask":             (False,  False,  True,   True,   True,   True,   True,   True),
    "model.window.unit":               ("none", "none", "tokens", "tokens", "tokens_in_blocks", "blocks", "blocks",
                                        "blocks"),
    "model.precision.mode":            ("autocast", "autocast", *["explicit"] * 6),
    "model.precision.compute":         ("bf16",) * 8,
    "model.precision.embeddings":      ("fp32", "fp32", *["bf16"] * 6),
    "model.precision.scalars":         (ANY, ANY, *["bf16"] * 5, "fp32"),
    "model.precision.round_matrices_at_init": (False, False, *[True] * 5, False),
    "data.end_of_text":                (50256,) * 8,
    "data.tokenizer":                  ("gpt2",) * 8,
    "data.order":                      ("sequential",) * 8,
    "optim.matrices":                  ("muon",) * 8,
    "optim.clip_norm":                 (None,) * 8,
    "optim.muon.lr":                   (0.00036, 0.00036, *[0.05] * 6),
    "optim.muon.momentum":             (0.95,) * 8,
    "optim.muon.momentum_start":       (0.95,   0.95,   0.85,   0.85,   0.85,   0.85,   0.85,   0.85),
    "optim.muon.momentum_warmup_steps": (0,     0,      300,    300,    300,    300,    300,    300),
    "optim.muon.momentum_form":        (*["sum"] * 4, *["average"] * 4),
    "optim.muon.scale_rule":           ("longest_side", "longest_side", *["aspect"] * 6),
    "optim.muon.ns_steps":             (5,) * 8,
    "optim.muon.ns_association":       (ANY, "product_first", ANY, *["polynomial_first"] * 5),
    "optim.muon.ns_norm_of":           ("unrounded", *["rounded"] * 7),
    "optim.muon.ns_dtype":             ("bf16",) * 8,
    "optim.muon.weight_decay":         (0.0,) * 8,
    "optim.adam.embedding_lr":         (0.0036, 0.0036, *[0.6] * 6),
    "optim.adam.lm_head_lr":              (ANY, ANY, *[0.008] * 6),
    "optim.adam.scalar_lr":            (ANY, ANY, *[0.04] * 6),
    "optim.adam.beta1":                (0.9,    0.9,    0.8,    0.8,    0.8,    0.8,    0.8,    0.8),
    "optim.adam.beta2":                (0.95,) * 8,
    "optim.adam.eps":                  (1e-8,) * 8,
    "optim.adam.weight_decay":         (0.0,) * 8,
    "optim.schedule.cooldown_steps":   (1800,   1450,   640,    600,    600,    600,    600,    None),
    "optim.schedule.cooldown_share":   (None,   None,   None,   None,   None,   None,   None,   0.4),
    "optim.schedule.floor":            (0.0,) * 8,
    "train.compile":                   (True,) * 8,
    "train.untimed_steps":                (10,) * 8,
    "train.coordinate_descent":        (ANY, *[True] * 6, False),
    "train.skip_guards":               (False,  False,  False,  False,  False,  True,   True,   False),
    "train.expandable_segments":       (False,  False,  False,  False,  False,  False,  True,   False),
    "parallel.bucket_views":           (False,  False,  False,  False,  False,  True,   True,   True),
    "evaluate.every":                  (125,) * 8,
    "evaluate.tokens":                 (10_485_760,) * 8,
}  # fmt: skip


@pytest.mark.parametrize("field", FACTS)
def test_a_setting_has_the_records_value_in_all_eight(field: str) -> None:
    assert tuple(dict(flatten(preset(name)))[field] for name in RECORDS) == FACTS[field]


def test_rows_of_tables_and_head() -> None:
    models = [preset(name).model for name in RECORDS]
    padded, unpadded = 50_304, 50_257
    assert [m.embedding_rows for m in models] == [unpadded, *[padded] * 5, unpadded, padded]
    assert [m.lm_head_rows for m in models] == [unpadded, *[padded] * 7]


def test_every_preset_carries_its_own_name() -> None:
    assert all(preset(name).preset == name for name in PRESETS)


# ---- the window


def exact_window(name: str, step: int, steps: int) -> int:
    """In integers: 64·⌊(1728 s/N + 64)/64⌋ tokens up to record 15, 128·⌊(1728 s/N + 128)/128⌋ after."""
    quantum = 64 if name <= R15 else 128
    return quantum * ((1728 * step + quantum * steps) // (quantum * steps))


@pytest.mark.parametrize("name", RECORDS[2:])
def test_the_window_at_every_step(name: str) -> None:
    config = preset(name)
    found = [config.model.window.tokens_at(step, config.steps) for step in range(config.steps + 1)]
    assert found == [exact_window(name, step, config.steps) for step in range(config.steps + 1)]


CHANGES = {
    R14: (
        57, 114, 170, 227, 284, 340, 397, 454, 510, 567, 624, 680, 737, 794, 850, 907, 964, 1020, 1077, 1134, 1190,
        1247, 1304, 1360, 1417, 1474, 1530,
    ),
    R15: (
        55, 110, 165, 220, 275, 329, 384, 439, 494, 549, 603, 658, 713, 768, 823, 878, 932, 987, 1042, 1097, 1152,
        1206, 1261, 1316, 1371, 1426, 1480,
    ),
    R16: (110, 220, 329, 439, 549, 658, 768, 878, 987, 1097, 1206, 1316, 1426),
    R17: (111, 221, 332, 442, 552, 663, 773, 883, 994, 1104, 1215, 1325, 1435),
    R18: (103, 206, 309, 412, 515, 618, 721, 824, 927, 1030, 1133, 1236, 1339),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_the_window_changes_at_the_records_steps(name: str) -> None:
    config, first = preset(name), 64 if name <= R15 else 128
    windows = [config.model.window.tokens_at(step, config.steps) for step in range(config.steps + 1)]
    assert windows[0] == first
    changed = [step for step in range(1, config.steps + 1) if windows[step] != windows[step - 1]]
    assert tuple(changed) == CHANGES[name]
    assert [windows[step] for step in changed] == list(range(2 * first, 1793, first))


def test_up_to_record_15_the_widest_window_is_only_for_the_last_validation() -> None:
    for name in (R13, R14, R15):
        config = preset(name)
        assert config.model.window.tokens_at(config.steps - 1, config.steps) == 1728
        assert config.model.window.tokens_at(config.steps, config.steps) == 1792
        assert config.model.window.widest_tokens == 1792


# ---- rates and momentum


@pytest.mark.parametrize(
    ("name", "steps", "cooldown"),
    [(R04, 6200, 1800), (R05, 5100, 1450), (R13, 1750, 640), (R14, 1530, 600), (R15, 1480, 600), (R16, 1480, 600),
     (R17, 1490, 600), (R18, 1390, 556)],
)  # fmt: skip
def test_the_rate_at_every_step(name: str, steps: int, cooldown: int) -> None:
    config = preset(name)
    length = cooldown_steps_of(config.optim.schedule, config.steps)
    found = [lr_scale(step, steps=config.steps, cooldown_steps=length) for step in range(steps)]
    line = [1.0 if step < steps - cooldown else (steps - step) / cooldown for step in range(steps)]
    assert found == pytest.approx(line, rel=1e-12)
    assert found[steps - cooldown] == 1.0
    assert found[steps - cooldown + 1] < 1.0


@pytest.mark.parametrize("name", RECORDS)
def test_the_momentum_at_every_step(name: str) -> None:
    config = preset(name)
    constant = name in (R04, R05)
    for step in range(config.steps):
        expected = 0.95 if constant else 0.85 + 0.10 * min(step / 300, 1)
        assert muon_momentum(step, config.steps, config.optim.muon) == pytest.approx(expected, rel=1e-12)


# ---- a record is a diff

DIFFS = {
    (R04, R05): """steps model.embedding_multiple model.lm_head_multiple model.num_heads model.head_dim model.qkv
        model.activation model.zero_init_outputs model.attention_branch_scale model.norm_eps model.qk_norm
        model.qk_norm_eps model.rotary.table_dtype model.rotary.arithmetic optim.muon.ns_norm_of
        optim.schedule.cooldown_steps""",
    (R05, R13): """steps model.norm_eps model.qk_norm model.rotary.max_tokens model.tied_lm_head model.embedding_init
        model.lm_head_init model.embedding_norm model.x0_mix model.unet_skips model.value_path model.value_lambdas
        model.softcap model.document_mask model.window.unit model.window.start_tokens model.window.quantum_tokens
        model.precision.mode model.precision.embeddings model.precision.scalars model.precision.round_matrices_at_init
        batch.sequence_tokens optim.muon.lr optim.muon.momentum_start optim.muon.momentum_warmup_steps
        optim.muon.scale_rule optim.muon.ns_association optim.adam.embedding_lr optim.adam.beta1
        optim.schedule.cooldown_steps""",
    (R13, R14): """steps model.value_path model.value_storage model.rotary.frequency_dtype
        optim.schedule.cooldown_steps""",
    (R14, R15): """steps model.value_path model.value_lambdas model.window.unit optim.muon.momentum_form""",
    (R15, R16): """model.value_storage model.window.unit model.window.start_tokens model.window.quantum_tokens
        train.skip_guards parallel.bucket_views""",
    (R16, R17): """steps model.embedding_multiple model.value_path model.layers_without_attention model.rotary.base
        model.rotary.rotary_fraction model.rotary.spacing model.rotary.frequency_dtype model.rotary.arithmetic
        train.expandable_segments""",
    (R17, R18): """steps model.softcap model.embedding_multiple model.rotary.table_dtype model.precision.scalars
        model.precision.round_matrices_at_init optim.schedule.cooldown_steps optim.schedule.cooldown_share
        train.coordinate_descent train.skip_guards train.expandable_segments""",
}


@pytest.mark.parametrize(("before", "after"), DIFFS)
def test_neighbours_differ_in_what_the_record_changed_and_nothing_else(before: str, after: str) -> None:
    found = {change.field for change in changes(preset(before), preset(after))} - {"preset"}
    assert found == set(DIFFS[before, after].split())


def test_every_record_names_its_predecessor_and_its_public_result() -> None:
    assert [(PUBLIC[name].record, PUBLIC[name].predecessor) for name in RECORDS] == [
        (4, None), (5, R04), (13, R05), (14, R13), (15, R14), (16, R15), (17, R16), (18, R17)
    ]  # fmt: skip
    assert [PUBLIC[name].minutes for name in RECORDS] == [22.3, 15.2, 4.66, 4.41, 3.95, 3.80, 3.57, 3.4]
    losses = [3.2785, 3.2741, 3.2770, 3.2776, 3.2785, 3.2785, 3.2794, 3.2785]
    assert [PUBLIC[name].val_loss for name in RECORDS] == losses
