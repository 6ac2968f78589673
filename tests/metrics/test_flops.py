"""Parameter totals of the eight records, and the arithmetic of a token, against figures worked out elsewhere."""

import dataclasses

import pytest

from paceline.metrics.flops import flops_per_token, mean_flops_per_token, mean_visible_keys, utilisation
from paceline.settings.data import BatchConfig
from paceline.settings.model import LayerOverride, ModelConfig, WindowConfig
from paceline.settings.optim import OptimConfig
from paceline.settings.schedule import Stage
from paceline.settings.spec import describe

R04 = ModelConfig(num_heads=12, head_dim=64, tied_lm_head=True, qkv="fused", activation="gelu")
R05 = ModelConfig(embedding_multiple=128, lm_head_multiple=128, tied_lm_head=True)
R13 = dataclasses.replace(
    R05, tied_lm_head=False, x0_mix=True, unet_skips=True, value_path="residual", value_lambdas=1,
    window=WindowConfig(unit="tokens", start_tokens=64, quantum_tokens=64),
)  # fmt: skip
R14 = dataclasses.replace(R13, value_path="layerwise", value_storage="chunks")
R15 = dataclasses.replace(R14, value_path="mirrored", value_lambdas=2)
R16 = dataclasses.replace(R15, value_storage="tables", window=WindowConfig(unit="blocks"))
R17 = dataclasses.replace(R16, value_path="sparse", embedding_multiple=1, layers_without_attention=(7,))
R18 = dataclasses.replace(R17, embedding_multiple=128)


@pytest.mark.parametrize(
    ("model", "total"),
    [
        (R04, 123_532_032),
        (R05, 123_568_128),
        (R13, 162_201_642),
        (R14, 625_803_306),
        (R15, 394_002_486),
        (R16, 394_002_486),
        (R17, 275_598_388),
        (R18, 275_742_772),
    ],
)
def test_totals_are_those_of_the_records(model: ModelConfig, total: int) -> None:
    assert describe(model).numel() == total


@pytest.mark.parametrize(
    ("model", "parts"),
    [
        (R05, (38_633_472, 0, 0, 84_934_656, 0)),
        (R14, (38_633_472, 463_601_664, 38_633_472, 84_934_656, 42)),
        (R16, (38_633_472, 231_800_832, 38_633_472, 84_934_656, 54)),
        (R17, (38_597_376, 115_792_128, 38_633_472, 82_575_360, 52)),
        (R18, (38_633_472, 115_900_416, 38_633_472, 82_575_360, 52)),
    ],
)
def test_parts_are_those_of_the_records(model: ModelConfig, parts: tuple[int, ...]) -> None:
    groups = ("embeddings", "value_embeddings", "lm_head", "matrices", "scalars")
    assert tuple(describe(model).numel(group) for group in groups) == parts


def test_grouped_heads_shrink_keys_and_values_only() -> None:
    grouped = dataclasses.replace(R18, num_kv_heads=2)
    counts, full = describe(grouped), describe(R18)
    assert counts.numel("matrices") == full.numel("matrices") - 11 * 2 * 768 * 512
    assert counts.numel("value_embeddings") == full.numel("value_embeddings") // 3
    assert counts.numel("embeddings", "lm_head", "scalars") == full.numel("embeddings", "lm_head", "scalars")


def visible_by_counting(unit: str, window: int | None, length: int) -> float:
    """The masks as the records define them, pair by pair."""
    pairs = 0
    for q in range(length):
        for k in range(q + 1):
            near = unit in ("blocks", "none") or window is None or q - k < window
            block = unit in ("tokens", "none") or window is None or q // 128 - k // 128 < -(-window // 128)
            pairs += near and block
    return pairs / length


@pytest.mark.parametrize(
    ("unit", "window"),
    [("none", None), ("tokens", 64), ("tokens", 192), ("blocks", 128), ("blocks", 256), ("blocks", 4096),
     ("tokens_in_blocks", 64), ("tokens_in_blocks", 192), ("tokens_in_blocks", 256)],
)  # fmt: skip
def test_visible_keys_are_those_of_the_mask(unit: str, window: int | None) -> None:
    assert mean_visible_keys(unit, window, 512) == pytest.approx(visible_by_counting(unit, window, 512), rel=1e-12)


def test_a_step_of_record_18_costs_what_was_measured_against() -> None:
    """381 TFLOP of weight products; at a window of 7 blocks attention adds about 43 when no document ends."""
    per_step = 524_288
    weights = flops_per_token(R18, sequence_tokens=1, windows={"short": 128}) * per_step
    assert weights == pytest.approx(381e12, rel=0.002)
    attention = flops_per_token(R18, sequence_tokens=65_536, windows={"short": 896}) * per_step - weights
    assert attention == pytest.approx(12 * 768 * 11 * (6.5 * 128) * per_step, rel=0.01)


def test_the_mean_lies_between_the_first_and_the_last_window() -> None:
    first, last = (flops_per_token(R18, sequence_tokens=2048, windows={"short": window}) for window in (128, 1792))
    assert first < mean_flops_per_token(Run(model=R18, steps=1390)) < last


OPTIM, BATCH = OptimConfig(), BatchConfig(tokens=4096, sequence_tokens=2048)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """The part of a run's config from which its schedule follows."""

    model: ModelConfig
    steps: int
    optim: OptimConfig = OPTIM
    batch: BatchConfig = BATCH
    stages: tuple[Stage, ...] = ()


def test_the_mean_is_over_tokens_of_which_a_larger_batch_has_more() -> None:
    """Nine steps of one batch through a narrow window, one of three batches through a wide one."""
    stages = (Stage(share=0.9, window_tokens=128), Stage(share=0.1, window_tokens=1792, batch_tokens=12_288))
    narrow, wide = (flops_per_token(R18, sequence_tokens=2048, windows={"short": window}) for window in (128, 1792))
    mean = mean_flops_per_token(Run(model=R18, steps=10, stages=stages))
    assert mean == pytest.approx((9 * narrow + 3 * wide) / 12, rel=1e-12)


def test_candidates_save_their_share_of_the_head() -> None:
    """Half of the tokens with 10,000 of 50,304 logits, the others with all."""
    stages = (Stage(share=0.5, candidates=10_000), Stage(share=0.5, candidates=0))
    whole = mean_flops_per_token(Run(model=R18, steps=10))
    sampled = mean_flops_per_token(Run(model=dataclasses.replace(R18, candidates=12_288), steps=10, stages=stages))
    assert sampled == pytest.approx(whole - 6 * 768 * 40_304 / 2, rel=1e-12)


def test_a_layer_costs_what_its_own_widths_and_window_say() -> None:
    """Written out for one layer of each kind; 6 FLOP for a weight and a token, and for a key and a column of a head."""
    model = ModelConfig(
        vocab_size=64, width=16, num_layers=4, num_heads=2, head_dim=8, num_kv_heads=1,
        window=WindowConfig(unit="tokens"), long_window=WindowConfig(unit="tokens", start_tokens=256),
        layer_overrides=(
            LayerOverride(layers=(0,), qk_dim=4, v_dim=6),
            LayerOverride(layers=(1,), window="long", mlp_width=0),
            LayerOverride(layers=(2,), attention=False, mlp_width=24),
        ),
    )  # fmt: skip
    short, long = mean_visible_keys("tokens", 128, 512), mean_visible_keys("tokens", 256, 512)
    projections = 16 * (2 * 4 + 4 + 6 + 2 * 6) + 2 * 16 * (16 + 8 + 8 + 16)  # layers 0, 1 and 3
    weights = 64 * 16 + projections + 2 * (2 * 16 * 64) + 2 * 16 * 24  # head, attention, MLPs of layers 0 and 3, and 2
    attended = 2 * (4 + 6) * short + 2 * (8 + 8) * long + 2 * (8 + 8) * short
    found = flops_per_token(model, sequence_tokens=512, windows={"short": 128, "long": 256})
    assert found == pytest.approx(6 * (weights + attended), rel=1e-12)


def test_utilisation_is_silent_about_unknown_devices() -> None:
    assert utilisation(1e9, 1e5, "some card") is None
    assert utilisation(1e9, None, "NVIDIA H200") is None
    assert utilisation(989e6, 5e5, "NVIDIA H200") == pytest.approx(0.5)
