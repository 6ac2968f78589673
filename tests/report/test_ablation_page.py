"""An ablation on the page: waterfall, effects, its runs by arm; a damaged file is said."""

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import RunError
from paceline.core.files import write_json
from paceline.report import page
from paceline.report.charts import chart_data
from paceline.report.subject import load_subject
from report.ablation_on_disk import EFFECTS, WATERFALL, effect, write_ablation
from report.runs_on_disk import write_run


@pytest.fixture(autouse=True)
def without_plotly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "_plotly_js", lambda: "/* plotly.js */")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_ablation(tmp_path_factory.mktemp("ablation"))


def test_arms_are_the_groups_and_the_bars_add_up(folder: Path) -> None:
    subject = load_subject([folder])
    assert [(group.label, len(group.runs)) for group in subject.groups] == [
        ("full", 3), ("without-softcap", 3), ("base", 3),
    ]  # fmt: skip
    [drawn] = chart_data(subject)["ablations"]
    assert drawn["waterfall"] == WATERFALL
    *steps, end = (bar["value"] for bar in drawn["waterfall"])
    assert sum(steps) == pytest.approx(end)
    assert [effect["low"] for effect in drawn["effects"]] == [effect["loss"]["low"] for effect in EFFECTS]


def test_effects_have_their_intervals_and_what_is_indicative_says_so(folder: Path, tmp_path: Path) -> None:
    page.write_report([folder], tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    for expected in (
        "r18-softcap against r17-sparse-values", "Indicative only (scale 1/16, CPU)", "-0.0400 to -0.0220", "p = 0.012",
        "no measurable effect", "-6.1 s (-8.3 to -3.9)", "is worth 6.1 steps", "seeds 1, 2, 3 in every arm",
    ):  # fmt: skip
        assert expected in text, expected
    assert "Welch" not in text  # the seeds are paired, and the ablation has said what they tell


def test_a_finished_ablation_of_one_switch_misses_nothing(tmp_path: Path) -> None:
    """Its predecessor is not an arm of its own: it is the preset without the switch."""
    write_ablation(tmp_path, preset="demo", against="demo", waterfall=[], effects=EFFECTS[:1])
    values = json.loads((tmp_path / "ablation.json").read_text())
    write_json(tmp_path / "ablation.json", {**values, "arms": [a for a in values["arms"] if a["kind"] != "base"]})
    page.write_report([tmp_path], tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "no finished run" not in text
    assert "<h1>demo with and without Softcap 15</h1>" in text


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": 2}, "has format 2"),
        ({"waterfall": "none"}, "waterfall"),
        ({"arms": "none"}, "arms"),
        ({"arms": [3]}, "arms"),
        ({"exchange": {"steps_per_loss": 10**400, "at_step": 3}}, "steps_per_loss"),
        ({"effects": [{"technique": 3}]}, "effects"),
        ({"arms": [{"name": "full", "kind": "full", "runs": ["../elsewhere"]}]}, "not the name of a folder beside it"),
    ],
)
def test_a_damaged_ablation_is_said_beside_the_runs_that_are_well(
    change: dict[str, Any], said: str, folder: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    values = json.loads((folder / "ablation.json").read_text())
    (broken / "ablation.json").write_text(json.dumps({**values, **change}))
    with pytest.raises(RunError, match=said):
        load_subject([broken])
    subject = load_subject([broken, write_run(tmp_path / "run", steps=20)])
    assert len(subject.runs) == 1
    assert said in subject.left_out[0]


def test_one_seed_and_missing_arms_are_said_and_what_the_lab_keeps_for_itself_is_left_alone(tmp_path: Path) -> None:
    folder = write_ablation(
        tmp_path,
        effects=[effect("softcap", "Softcap 15", "leave-one-out", -0.03, 0.0, n=1, loss={"mean": -0.03}, noise=True)],
        waterfall=[],
        left_out=[{"arm": "no-segments", "why": "acts on a GPU only"}],
        not_counted=[{"run": "full-3", "why": "is not finished"}],
        surprise=1,
        arms=[
            {"name": "full", "kind": "full", "runs": ["full-1"], "rate": 0.8},
            {"name": "base", "kind": "base", "runs": []},
        ],
    )
    page.write_report([folder], tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    for expected in (
        "one seed only", "One of the two presets has no finished run", "no-segments acts on a GPU only.",
        "Not counted: full-3: is not finished.",
    ):  # fmt: skip
        assert expected in text, expected
    assert "no measurable effect" not in text


def test_a_run_missing_from_an_arm_is_said(tmp_path: Path) -> None:
    folder = write_ablation(tmp_path)
    (folder / "full-2" / "card.json").unlink()
    subject = load_subject([folder])
    assert len(subject.runs) == 8
    assert "full-2" in subject.left_out[0]
