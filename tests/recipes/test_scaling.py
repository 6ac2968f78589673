"""What --steps and --scale do to a preset: smaller everywhere, another recipe nowhere."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import ConfigError
from paceline.core.schema import changes, flatten, from_dict, to_dict
from paceline.recipes.presets import PRESETS, preset
from paceline.recipes.records import RECORDS as ALL_RECORDS
from paceline.recipes.scaling import parse_scale, scaled, with_steps
from paceline.settings.data import BUILTIN
from paceline.settings.model import LayerOverride
from paceline.settings.run import RunConfig
from paceline.settings.schedule import Stage, cooldown_steps_of, stage_of, widest_windows

RECORDS = list(ALL_RECORDS)
WINDOWED = [name for name in RECORDS if preset(name).model.window.unit != "none"]


@pytest.mark.parametrize("name", RECORDS)
def test_a_sixteenth_is_one_long_sequence_or_two_short_ones(name: str) -> None:
    batch = scaled(preset(name), 1 / 16).batch
    short = name in ("r04-muon", "r05-modern-arch")
    assert (batch.sequences, batch.sequence_tokens) == ((2, 1024) if short else (1, 2048))


MAY_SHRINK = {
    "steps", "model.width", "model.head_dim", "model.vocab_size", "batch.tokens", "batch.sequence_tokens", "data.dir",
    "data.tokenizer", "data.end_of_text", "train.device", "train.compile", "evaluate.every", "evaluate.tokens",
    "optim.schedule.cooldown_steps", "optim.schedule.warmup_steps", "stages", "batch.micro_tokens", "model.candidates",
    "model.layer_overrides", "model.ngrams.bigram_rows", "model.ngrams.trigram_rows",
}  # fmt: skip


def layer_map(config: RunConfig) -> list[tuple[bool, int | None]]:
    """For each layer whether it has attention, and its value table."""
    shapes = [layer.attention for layer in config.model.layers]
    return [(shape is not None, shape.value_table if shape is not None else None) for shape in shapes]


@pytest.mark.parametrize("name", list(PRESETS))
def test_a_sixteenth_keeps_every_technique(name: str) -> None:
    """All layers, the record's heads, maps, skips, masks and formats: only sizes and lengths differ."""
    base = preset(name)
    small = scaled(base, 1 / 16)
    assert {change.field for change in changes(base, small)} <= MAY_SHRINK
    assert layer_map(small) == layer_map(base)
    assert small.model.num_layers == {"demo": 2, "frontier-60": 11}.get(name, 12)
    for change, before in zip(small.model.layer_overrides, base.model.layer_overrides, strict=True):
        assert {name for name, value in vars(change).items() if value != vars(before)[name]} <= {"mlp_width"}


@pytest.mark.parametrize("name", RECORDS)
def test_a_sixteenth_has_the_stated_sizes(name: str) -> None:
    base, small = preset(name), scaled(preset(name), 1 / 16)
    assert small.model.width == 96
    assert small.model.head_dim == (8 if name == "r04-muon" else 16)
    assert small.model.vocab_size == round(50_257 / 16)
    assert small.steps == round(base.steps / 16)
    assert (small.data.dir, small.data.tokenizer) == (BUILTIN, f"bpe-{small.model.vocab_size}")


@pytest.mark.parametrize("name", WINDOWED)
def test_every_window_of_the_schedule_occurs_at_a_sixteenth(name: str) -> None:
    small = scaled(preset(name), 1 / 16)
    windows = {small.model.window.tokens_at(step, small.steps) for step in range(small.steps + 1)}
    quantum = small.model.window.quantum_tokens
    assert windows == set(range(quantum, 1793, quantum))
    assert small.batch.sequence_tokens > max(windows), "the widest window is narrower than the sequence"


@pytest.mark.parametrize("name", WINDOWED)
def test_a_windowed_record_keeps_sixteen_blocks_at_any_scale(name: str) -> None:
    for scale in (1 / 16, 1 / 64, 1 / 1000):
        assert scaled(preset(name), scale).batch.sequence_tokens == 2048


def test_stages_are_scaled_as_the_run_is() -> None:
    base = preset("r18-softcap")
    stages = (
        Stage(share=0.25, batch_tokens=131_072, lr=0.5),
        Stage(share=0.25, batch_tokens=8 * base.batch.tokens, window_tokens=512),
        Stage(share=0.5),
    )
    small = scaled(replace(base, stages=stages), 1 / 16)
    assert small.batch.tokens == 4096, "larger than the smallest, as it was"
    assert [stage.batch_tokens for stage in small.stages] == [2048, 8 * base.batch.tokens // 256, None]
    assert [replace(stage, batch_tokens=None) for stage in small.stages] == [
        replace(stage, batch_tokens=None) for stage in stages
    ], "shares, rates and windows stay"


def test_tables_of_ngrams_shrink_as_the_tokens_do() -> None:
    small = scaled(preset("frontier-60"), 1 / 16).model.ngrams
    assert (small.bigram_rows, small.trigram_rows) == (2**22 // 256, 2**22 // 256)
    least = scaled(preset("frontier-60"), 1 / 1000).model.ngrams
    assert (least.bigram_rows, least.trigram_rows) == (512, 512)
    assert scaled(preset("r18-softcap"), 1 / 16).model.ngrams == preset("r18-softcap").model.ngrams, "none stay none"


def test_scaled_candidates_hold_whatever_a_scaled_sequence_may_have_as_targets() -> None:
    base = preset("r18-softcap")
    base = replace(base, model=replace(base.model, candidates=12_288))
    stages = (Stage(share=0.5), Stage(share=0.3, candidates=40_000), Stage(share=0.2, candidates=0))
    small = scaled(replace(base, stages=stages), 1 / 16)
    assert small.model.candidates == small.batch.sequence_tokens == 2048
    assert [stage.candidates for stage in small.stages] == [None, 2500, 0]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.floats(1e-4, 1.0))
def test_every_stage_has_a_step_at_any_scale(weights: list[int], scale: float) -> None:
    stages = tuple(Stage(share=weight / sum(weights)) for weight in weights)
    small = scaled(replace(preset("r18-softcap"), stages=stages), scale)
    assert {stage_of(small, step) for step in range(small.steps)} == set(range(len(stages)))


@pytest.mark.parametrize(("window", "sequence"), [(1792, 2048), (2048, 2176), (4096, 4224)])
def test_the_widest_window_of_a_stage_is_narrower_than_the_scaled_sequence(window: int, sequence: int) -> None:
    base = replace(preset("r18-softcap"), stages=(Stage(share=0.5), Stage(share=0.5, window_tokens=window)))
    small = scaled(base, 1 / 16)
    assert widest_windows(small) == {"short": window}
    assert small.batch.sequence_tokens == sequence


def overridden(**changes: int) -> RunConfig:
    base = preset("r18-softcap")
    return replace(base, model=replace(base.model, layer_overrides=(LayerOverride(layers=(5, -4), **changes),)))


def test_layers_of_other_widths_are_scaled_as_the_others_are() -> None:
    base = overridden(qk_dim=64, v_dim=128, mlp_width=1024).model
    small = scaled(overridden(qk_dim=64, v_dim=128, mlp_width=1024), 1 / 16).model
    for layer, before in zip(small.layers, base.layers, strict=True):
        assert layer.mlp_width * 8 == before.mlp_width
        if layer.attention is not None and before.attention is not None:
            assert layer.attention.qk_dim * 8 == before.attention.qk_dim
            assert layer.attention.v_dim * 8 == before.attention.v_dim


def test_an_override_of_the_usual_width_stays_one_and_a_missing_mlp_stays_missing() -> None:
    """Also where rounding, or the least width of a head, decides."""
    usual = preset("r18-softcap").model
    for scale in (0.9, 1 / 3, 1 / 16, 1 / 1000):
        small = scaled(overridden(qk_dim=usual.head_dim, mlp_width=usual.mlp_width), scale).model
        assert small.layers == scaled(preset("r18-softcap"), scale).model.layers
    assert scaled(overridden(mlp_width=0), 1 / 16).model.layers[5].mlp_width == 0


@given(st.integers(1, 40).map(lambda half: 2 * half), st.integers(1, 5000), st.floats(1e-4, 1.0))
def test_no_overridden_width_grows(dim: int, mlp_width: int, scale: float) -> None:
    (change,) = scaled(overridden(qk_dim=dim, v_dim=dim, mlp_width=mlp_width), scale).model.layer_overrides
    assert 0 < (change.qk_dim or 0) <= dim
    assert 0 < (change.v_dim or 0) <= dim
    assert 0 < (change.mlp_width or 0) <= mlp_width


def sizes(config: RunConfig) -> dict[str, int]:
    names = ("steps", "model.width", "model.head_dim", "model.vocab_size", "batch.tokens", "batch.sequence_tokens")
    leaves = dict(flatten(config))
    return {name: leaves[name] for name in names}


@given(st.sampled_from(sorted(PRESETS)), st.floats(1e-4, 1.0))
def test_any_scale_gives_a_valid_preset_that_is_nowhere_larger(name: str, scale: float) -> None:
    base = preset(name)
    small = scaled(base, scale)
    larger = {field for field, size in sizes(small).items() if size > sizes(base)[field]}
    assert not larger
    assert cooldown_steps_of(small.optim.schedule, small.steps) <= small.steps
    assert small.evaluate.every is not None
    assert small.evaluate.every <= small.steps
    assert from_dict(RunConfig, to_dict(small)) == small


def test_a_larger_scale_is_nowhere_smaller() -> None:
    for name in PRESETS:
        ladder = [sizes(scaled(preset(name), scale)) for scale in (1 / 64, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)]
        for field in ladder[0]:
            values = [rung[field] for rung in ladder]
            assert values == sorted(values), (name, field)


def test_the_whole_preset_is_scale_one() -> None:
    for name in PRESETS:
        assert scaled(preset(name), 1.0) == preset(name)


@pytest.mark.parametrize(
    ("text", "share"), [("1/16", 1 / 16), ("0.0625", 1 / 16), ("1", 1.0), ("1/1", 1.0), ("3/4", 0.75)]
)
def test_a_scale_is_a_number_or_a_fraction(text: str, share: float) -> None:
    assert parse_scale(text) == share


@pytest.mark.parametrize(
    "text", ["0", "-1", "2", "17/16", "1/0", "1/", "1/2/3", "/2", "half", "", "nan", "inf", "1/nan", "1/-2"]
)
def test_any_other_scale_is_refused_with_the_flag_and_a_way_out(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--scale .* is not in \(0, 1\]; write it as 0.25 or 1/16"):
        parse_scale(text)


@pytest.mark.parametrize(
    ("name", "steps", "cooldown"),
    [("r17-sparse-values", 95, 38), ("r17-sparse-values", 1490, 600), ("r04-muon", 3100, 900), ("r18-softcap", 95, 38),
     ("r14-value-embed", 1, 1)],
)  # fmt: skip
def test_another_length_keeps_the_shape_of_the_schedule(name: str, steps: int, cooldown: int) -> None:
    base = preset(name)
    other = with_steps(base, steps)
    assert other.steps == steps
    length = cooldown_steps_of(other.optim.schedule, steps)
    assert length == pytest.approx(cooldown if base.optim.schedule.cooldown_steps else 0.4 * steps)
    assert {change.field for change in changes(base, other)} <= {"steps", "optim.schedule.cooldown_steps"}
    assert other.optim.muon.momentum_warmup_steps == 300 or name == "r04-muon", "the warm-up keeps its length"


DEMO_SHARES = (
    "activation qkv zero_init_outputs attention_branch_scale qk_norm tied_lm_head embedding_init lm_head_init "
    "embedding_norm x0_mix unet_skips value_path value_lambdas value_storage softcap document_mask rotary.base "
    "rotary.rotary_fraction rotary.spacing rotary.table_dtype rotary.arithmetic window.unit window.start_tokens "
    "window.quantum_tokens"
)


def test_the_demo_has_the_techniques_of_record_18() -> None:
    demo, newest = dict(flatten(preset("demo").model)), dict(flatten(preset("r18-softcap").model))
    for field in DEMO_SHARES.split():
        assert demo[field] == newest[field], field


def test_the_demo_reads_the_built_in_corpus_on_any_device() -> None:
    demo = preset("demo")
    assert (demo.data.dir, demo.train.device, demo.train.compile) == (BUILTIN, "auto", False)
    assert demo.data.tokenizer == f"bpe-{demo.model.vocab_size}"
    windows = {demo.model.window.tokens_at(step, demo.steps) for step in range(demo.steps + 1)}
    assert windows == {128, 256, 384, 512}
