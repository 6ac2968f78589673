"""Arms and runs are decided beforehand, can be typed as `paceline train`, and a folder keeps to its plan."""

from pathlib import Path

import pytest

from lab.ablate.pretended import small, small_plan
from paceline.commands.train import base_config, parse_arguments
from paceline.core.errors import UserError
from paceline.lab.ablate.arms import PLAN_FILE, Choice, keep_plan, make_plan


@pytest.mark.parametrize(("after", "before"), [("r18-softcap", "r17-sparse-values"), ("r05-modern-arch", "r04-muon")])
def test_a_runs_words_make_its_config(after: str, before: str) -> None:
    for run in small_plan(after, before, seeds=1).runs[::3]:
        assert parse_arguments(run.words, base_config(run.words)).config == run.config


def test_every_arm_has_every_seed_and_seeds_come_first_in_the_order() -> None:
    plan = small_plan(seeds=3)
    arms = [arm.name for arm in plan.arms]
    assert [(run.arm, run.seed) for run in plan.runs] == [(arm, seed) for seed in (0, 1, 2) for arm in arms]
    assert len({run.name for run in plan.runs}) == len(plan.runs)


def test_arms_of_one_part() -> None:
    plan = small_plan(only="softcap-15", seeds=1)
    assert [(arm.name, arm.config.preset, arm.config.model.softcap) for arm in plan.arms] == [
        ("full", "r18-softcap", 15.0),
        ("base", "r17-sparse-values", 30.0),
        ("without-softcap-15", "r18-softcap", 30.0),
        ("with-softcap-15", "r17-sparse-values", 15.0),
    ]
    assert not plan.whole
    assert [arm.kind for arm in small_plan(only="softcap-15", add=False).arms] == ["full", "base", "without"]
    assert [arm.kind for arm in small_plan(only="softcap-15", leave_out=False).arms] == ["full", "base", "with"]
    assert [arm.kind for arm in small_plan(only="softcap-15", add=False, base=False).arms] == ["full", "without"]


def test_an_impossible_arm_is_left_out_with_its_reason() -> None:
    plan = small_plan("r14-value-embed", "r13-window-warmup", only="value-chunks")
    assert [arm.name for arm in plan.arms] == ["full", "base", "without-value-chunks"]
    assert [name for name, _ in plan.left_out] == ["with-value-chunks"]
    assert "nothing to do" in plan.left_out[0][1]


def test_all_arms_are_judged_as_the_preset_is() -> None:
    plan = small_plan()
    assert small("r17-sparse-values").evaluate != small("r18-softcap").evaluate
    assert len({arm.config.evaluate for arm in plan.arms}) == 1
    assert len({arm.config.steps for arm in plan.arms}) == 1


def test_presets_that_do_not_differ_are_refused() -> None:
    with pytest.raises(UserError, match="do not differ"):
        make_plan(small("r18-softcap"), small("r18-softcap"), Choice(scale="1/16"))


def test_a_folder_keeps_to_its_plan(tmp_path: Path) -> None:
    plan = small_plan(only="softcap-15", seeds=2)
    keep_plan(plan, tmp_path / "a")
    keep_plan(plan, tmp_path / "a")
    with pytest.raises(UserError, match="was begun with 8 runs, this command has 12"):
        keep_plan(small_plan(only="softcap-15", seeds=3), tmp_path / "a")
    with pytest.raises(UserError, match=r"was begun with `paceline train .*` where this command has `paceline train "):
        keep_plan(small_plan(only="cooldown-share", seeds=2), tmp_path / "a")
    (tmp_path / "a" / PLAN_FILE).write_text("[]")
    with pytest.raises(UserError, match="not a plan of ours"):
        keep_plan(plan, tmp_path / "a")


def test_a_folder_with_other_things_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match=r"holds other things and no plan\.json"):
        keep_plan(small_plan(), tmp_path)
