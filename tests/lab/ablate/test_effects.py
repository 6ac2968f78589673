"""What runs with known losses say: effects, corrections, noise, the waterfall, the exchange rate."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lab.ablate.pretended import STEPS, small_plan, write_all, write_run
from paceline.analysis.ablation import Ablation, Effect, read_ablation, write_ablation
from paceline.core.schema import read_json
from paceline.lab.ablate.arms import Plan, Run
from paceline.lab.ablate.effects import _shrunk, conclude
from paceline.lab.ablate.outcomes import outcomes
from paceline.recipes.presets import preset

PLAN = small_plan(only="softcap-15,cooldown-share", seeds=3)
LUCK = {0: 0.00, 1: 0.05, 2: -0.02}
"""What a seed does to all arms alike."""
JITTER = {0: 0.001, 1: -0.001, 2: 0.0}
"""What it does to some."""


def loss_of(run: Run) -> float:
    """Softcap 15 lowers the loss by 0.1 in the new preset and by 0.06 in the old one; the cool-down changes nothing."""
    losses = {"full": 6.0, "without-softcap-15": 6.1, "base": 6.2, "with-softcap-15": 6.14}
    name = {"without-cooldown-share": "full", "with-cooldown-share": "base"}.get(run.arm, run.arm)
    return losses[name] + LUCK[run.seed] + (JITTER[run.seed] if "softcap" in name else 0.0)


def concluded(plan: Plan, folder: Path) -> Ablation:
    return conclude(plan, outcomes(plan.runs, folder), {})


@pytest.fixture
def ablation(tmp_path: Path) -> Ablation:
    write_all(PLAN, tmp_path, loss_of)
    return concluded(PLAN, tmp_path)


def effect(ablation: Ablation, technique: str, kind: str = "leave-one-out") -> Effect:
    return next(one for one in ablation.effects if (one.technique, one.kind) == (technique, kind))


def test_an_effect_is_with_minus_without_whatever_the_seeds_luck(ablation: Ablation) -> None:
    for kind, mean in (("leave-one-out", -0.1), ("add-one-in", -0.06)):
        found = effect(ablation, "softcap-15", kind)
        assert found.loss.mean == pytest.approx(mean)
        assert found.loss.low is not None
        assert found.loss.high is not None
        assert found.loss.low < mean < found.loss.high < 0
        assert found.n == 3
        assert not found.noise


def test_what_changes_nothing_is_said_to_change_nothing(ablation: Ablation) -> None:
    found = effect(ablation, "cooldown-share")
    assert found.noise
    assert found.words == "With cooldown-share the loss is the same to the last bit in 3 seeds, by leaving it out."


def test_words_have_the_numbers(ablation: Ablation) -> None:
    words = effect(ablation, "softcap-15").words
    assert words.startswith("With softcap-15 the loss changes by -0.1000 (95 %: -0.1")
    assert words.endswith("after Holm), by leaving it out.")


def test_p_values_are_raised_for_the_number_of_effects(ablation: Ablation) -> None:
    ps = sorted((one.loss.p or 0.0, one.loss.p_holm or 0.0) for one in ablation.effects)
    assert len(ps) == 4
    assert ps[0][1] == pytest.approx(4 * ps[0][0])
    assert ps[1][1] == pytest.approx(max(ps[0][1], 3 * ps[1][0]))
    assert [p_holm for _, p_holm in ps[2:]] == [1.0, 1.0]


def test_the_waterfall_ends_at_the_preset_through_an_interaction_bar(ablation: Ablation) -> None:
    bars = ablation.waterfall
    assert [bar.kind for bar in bars] == ["start", "step", "step", "interaction", "end"]
    assert sum(bar.value for bar in bars[:-1]) == pytest.approx(bars[-1].value)
    assert bars[0].value == pytest.approx(6.2 + 0.01)  # the mean luck
    assert {bar.label: bar.value for bar in bars}["softcap-15"] == pytest.approx(-0.08)  # mean of both kinds
    assert bars[3].label == "interaction and what was not run"
    assert bars[3].value == pytest.approx(-0.12)


def test_only_seeds_that_both_arms_have_are_compared(tmp_path: Path) -> None:
    write_all(PLAN, tmp_path, loss_of)
    gone, spoilt = "without-softcap-15-seed-1", "full-seed-2"
    (tmp_path / gone / "config.json").unlink()
    (tmp_path / gone / "card.json").unlink()
    (tmp_path / spoilt / "card.json").write_text("{")
    ablation = concluded(PLAN, tmp_path)
    assert effect(ablation, "softcap-15").n == 1
    assert effect(ablation, "softcap-15").loss.mean == pytest.approx(-0.1 - JITTER[0])
    assert effect(ablation, "softcap-15", "add-one-in").n == 3
    named = {one.run: one.why for one in ablation.not_counted}
    assert named[gone] == "is not finished"
    assert named[spoilt].startswith("is damaged")


def test_one_seed_has_a_difference_and_no_interval(tmp_path: Path) -> None:
    plan = small_plan(only="softcap-15", seeds=1)
    write_all(plan, tmp_path, loss_of)
    ablation = concluded(plan, tmp_path)
    found = effect(ablation, "softcap-15")
    assert found.loss.mean == pytest.approx(-0.101)
    assert (found.loss.low, found.loss.p, found.loss.p_holm) == (None, None, None)
    assert found.noise
    assert found.words.endswith("one seed has no interval.")
    assert found.time_at_equal_loss_s is None


def test_step_time_memory_and_time_to_equal_loss(tmp_path: Path) -> None:
    """Without the part a run is 10 s slower, takes half a GiB more and ends 0.1 higher."""
    plan = small_plan(only="softcap-15", seeds=3, add=False)
    for run in plan.runs:
        slow = run.arm.startswith("without")
        seconds = 30.0 if slow else 20.0
        curve = tuple(
            (step, loss_of(run) + (STEPS - step) / 10, None, seconds * step / STEPS, 0.0) for step in (5, 10, 15, 20)
        )
        more: dict[str, Any] = {"train_s": seconds, "peak_bytes": (3 if slow else 2) * 2**29, "losses": curve}
        write_run(run, tmp_path, loss_of(run), **more)
    found = effect(concluded(plan, tmp_path), "softcap-15")
    assert found.step_s is not None
    assert found.memory_gib is not None
    assert found.time_at_equal_loss_s is not None
    assert found.step_s.mean == pytest.approx(-1.0)  # 10 s over the 10 steps that are timed
    assert found.memory_gib.mean == pytest.approx(-0.5)
    assert found.time_at_equal_loss_s.mean == pytest.approx(-11, abs=0.3)  # 30 s against step 19 of 20, at 1 s a step


def test_times_on_other_hardware_are_not_compared(ablation: Ablation, tmp_path: Path) -> None:
    assert effect(ablation, "softcap-15").step_s is not None
    write_run(PLAN.runs[0], tmp_path, loss_of(PLAN.runs[0]), environment={"cpu": "another CPU", "cores": 64})
    found = effect(concluded(PLAN, tmp_path), "softcap-15")
    assert found.n == 3
    assert (found.step_s, found.time_at_equal_loss_s) == (None, None)


def test_the_exchange_rate_is_that_of_the_presets_mean_curve(tmp_path: Path) -> None:
    plan = small_plan(only="softcap-15", seeds=2)
    for run in plan.runs:
        curve = tuple((step, 8 - step / 10 + LUCK[run.seed], None, float(step), 0.0) for step in range(0, 21, 2))
        write_run(run, tmp_path, curve[-1][1], losses=curve)
    rate = concluded(plan, tmp_path).exchange
    assert rate is not None
    assert rate.at_step == 20
    assert rate.steps_per_loss == pytest.approx(10, rel=0.05)


def test_a_config_smaller_than_its_preset_is_indicative() -> None:
    record = preset("r18-softcap")
    assert _shrunk(record) == []
    small = replace(record, model=replace(record.model, num_layers=8), batch=replace(record.batch, tokens=65_536))
    assert _shrunk(small) == ["layers 8 instead of 12", "tokens a step 65,536 instead of 524,288"]


def test_small_or_slow_means_indicative(ablation: Ablation, tmp_path: Path) -> None:
    assert (ablation.indicative, ablation.why_indicative) == (True, "scale 1/16, CPU")
    write_all(PLAN, tmp_path, loss_of, device="cuda", environment={"gpu": "NVIDIA H200"})
    found = concluded(PLAN, tmp_path)
    assert (found.why_indicative, found.hardware) == ("scale 1/16", "1 x NVIDIA H200")


def test_the_file_is_plain_json_with_the_agreed_keys(ablation: Ablation, tmp_path: Path) -> None:
    found = read_json(write_ablation(ablation, tmp_path / "result"))
    assert read_ablation(tmp_path / "result") == ablation
    told = {"format", "preset", "against", "scale", "indicative", "why_indicative", "steps", "seeds", "hardware"}
    assert told | {"made", "arms", "effects", "waterfall", "exchange"} <= found.keys()
    assert found["arms"][0]["runs"] == [f"full-seed-{seed}" for seed in range(3)]
    differences = {"loss", "time_at_equal_loss_s", "step_s", "memory_gib"}
    assert found["effects"][0].keys() == differences | {"technique", "title", "kind", "n", "noise", "words"}
