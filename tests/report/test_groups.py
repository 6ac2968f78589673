"""Only like runs are averaged, and what is in no mean is said."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.analysis import statistics
from paceline.core.environment import CodeVersion
from paceline.report.charts import training_band, validation_band
from paceline.report.subject import Subject, load_subject, mean_time
from paceline.report.summary_text import mean_loss, remarks, sentences
from report.runs_on_disk import write_run


def subject_of(tmp_path: Path, *runs: dict[str, Any]) -> Subject:
    return load_subject(
        [
            write_run(tmp_path / f"run-{number}", **{"steps": 120, "softcap": 15.0, "name": f"run-{number}"} | run)
            for number, run in enumerate(runs)
        ]
    )


def seeds(count: int, base: float = 3.2, **others: Any) -> list[dict[str, Any]]:
    """Runs that differ in the seed, and in their losses by a hundredth."""
    return [{"seed": seed, "floor": base + 0.01 * seed, **others} for seed in range(count)]


def test_seeds_of_one_configuration_are_one_group(tmp_path: Path) -> None:
    subject = subject_of(tmp_path, *seeds(3), {"softcap": 30.0})
    assert [(group.label, group.seeds) for group in subject.groups] == [("demo", [0, 1, 2]), ("run-3", [0])]


@pytest.mark.parametrize(
    "other", [{"data_fingerprint": "other"}, {"track": "en-140M"}, {"device": "cuda"}, {"steps": 130}]
)
def test_other_data_track_device_or_length_is_another_group(other: dict[str, Any], tmp_path: Path) -> None:
    assert len(subject_of(tmp_path, {}, {"seed": 1, **other}).groups) == 2


OTHER_CODE = CodeVersion(version="0.1.0", commit="f" * 40, dirty=False)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"environment": {"cpu": "another", "cores": 4}}, "2 kinds of hardware"),
        ({"ranks": 2}, "2 kinds of hardware"),
        ({"code_version": OTHER_CODE}, "2 versions of the code"),
    ],
)
def test_other_hardware_or_code_splits_the_times_and_not_the_losses(
    other: dict[str, Any], said: str, tmp_path: Path
) -> None:
    subject = subject_of(tmp_path, {}, {"seed": 1, **other})
    [group] = subject.groups
    assert group.seeds == [0, 1]
    assert mean_time(group, lambda run: run.train_s) is None
    band = training_band(group)
    assert band is not None
    assert np.isnan(band.at["train_s"]).all()
    assert np.isfinite(band.mean).all()
    assert any(said in remark for remark in remarks(subject))
    [alike] = subject_of(tmp_path / "alike", {}, {"seed": 1}).groups
    assert mean_time(alike, lambda run: run.train_s) == alike.runs[0].train_s


def test_a_label_says_what_sets_a_group_apart(tmp_path: Path) -> None:
    many = [*seeds(2), *seeds(2, softcap=30.0), *seeds(2, device="cuda")]
    labels = [group.label for group in subject_of(tmp_path, *many).groups]
    assert labels == ["demo, cpu", "demo, softcap 30.0, cpu", "demo, cuda"]


def test_groups_are_called_as_their_folders_without_what_all_names_share(tmp_path: Path) -> None:
    def named(stem: str, **others: Any) -> list[dict[str, Any]]:
        return [{"name": f"{stem}-seed{seed}", **run} for seed, run in enumerate(seeds(2, **others))]

    runs = [*named("r18-en-lr1"), *named("r18-en-lr2", softcap=30.0), {"name": "r18-en-long", "steps": 130}]
    assert [group.label for group in subject_of(tmp_path, *runs).groups] == ["lr1", "lr2", "long"]
    alike = [*named("r18"), *named("r18-lr2", softcap=30.0)]  # the first name is the beginning of the others, too
    assert [group.label for group in subject_of(tmp_path / "b", *alike).groups] == ["demo", "r18-lr2"]


def test_another_track_is_not_called_other_data(tmp_path: Path) -> None:
    subject = subject_of(tmp_path, *seeds(2), *seeds(2, track="en-140M"))
    said = " ".join([*sentences(subject.groups), *remarks(subject)])
    assert "other tracks (en-140M and none)" in said
    assert "data" not in said


def test_a_band_has_the_mean_and_the_extremes_of_its_runs(tmp_path: Path) -> None:
    [group] = subject_of(tmp_path, *seeds(3)).groups
    band = validation_band(group)
    assert band is not None
    assert band.at["step"].tolist() == [0, 100, 120]
    losses = sorted(run.card.val_loss or 0 for run in group.runs)
    assert (band.low[-1], band.mean[-1], band.high[-1]) == pytest.approx((losses[0], losses[1], losses[2]))


def test_unfinished_and_diverged_runs_are_in_no_mean_and_named(tmp_path: Path) -> None:
    subject = subject_of(tmp_path, *seeds(2), {"seed": 7, "done": 50}, {"seed": 8, "val_loss": None})
    [group] = subject.groups
    assert group.seeds == [0, 1]
    band = training_band(group)
    assert band is not None
    assert band.at["step"][-1] == 120
    said = " ".join(remarks(subject))
    assert "In no mean: run-2 (not finished: 50 of 120 steps), run-3 (diverged: " in said


def test_runs_in_progress_are_averaged_as_far_as_the_slowest_has_come(tmp_path: Path) -> None:
    [group] = subject_of(tmp_path, {"done": 50}, {"seed": 1, "done": 80}).groups
    band = training_band(group)
    assert band is not None
    assert band.at["step"][-1] == 50


def test_words_give_n_mean_and_interval_as_the_statistics_have_them(tmp_path: Path) -> None:
    groups = subject_of(tmp_path, *seeds(3), *seeds(3, base=3.1, softcap=30.0), {"softcap": 60.0}).groups
    said = sentences(groups)
    mean = mean_loss(groups[0])
    assert mean is not None
    assert f"demo: 3 runs (seeds 0, 1, 2) end at a validation loss of {mean.mean:.4f} on average" in said[0]
    assert f"95 % interval {mean.low:.4f} to {mean.high:.4f}" in said[0]
    difference = statistics.welch(groups[1].losses, groups[0].losses)
    assert difference.mean == pytest.approx(-0.1)
    assert "demo, softcap 30.0 minus demo: -0.1000" in said[2]
    assert "n = 3 and 3): is lower." in said[2]
    paired = statistics.paired(groups[1].losses, groups[0].losses)
    assert said[2].endswith(f" Seed by seed: 95 % interval {paired.low:+.4f} to {paired.high:+.4f}, p < 0.0001.")
    assert "Seed by seed" not in " ".join(
        sentences(subject_of(tmp_path / "b", *seeds(3), *seeds(2, softcap=30.0)).groups)
    )
    assert said[3] == "One seed only, so no interval and no comparison: run-6."


def test_groups_of_different_data_are_not_compared(tmp_path: Path) -> None:
    subject = subject_of(tmp_path, *seeds(2), *seeds(2, data_fingerprint="other", softcap=30.0))
    said = (
        "Not compared with demo, data 6f0c2b1d: demo, softcap 30.0, data other: other data (fingerprints other and "
        "6f0c2b1de1)."
    )
    assert sentences(subject.groups)[-1] == said
    assert "Runs of different data (6f0c2b1d, other): their losses are not comparable." in remarks(subject)


def test_a_seed_counts_once_and_different_code_is_said(tmp_path: Path) -> None:
    subject = subject_of(tmp_path, {}, {"floor": 9.0}, {"seed": 1, "code_version": OTHER_CODE})
    [group] = subject.groups
    assert group.seeds == [0, 1]
    assert max(group.losses) < 9
    assert "In no mean: run-1 (repeats seed 0 of run-0, which is no new sample)." in remarks(subject)
    assert any("2 versions of the code (0123456789, ffffffffff)" in remark for remark in remarks(subject))
