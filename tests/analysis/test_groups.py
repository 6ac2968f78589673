"""One decision about which runs are averaged, for `compare`, `board` and pages, also across versions."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lab.cards_on_disk import write_group
from lab.cards_on_disk import write_run as write_card_and_config
from paceline.analysis.groups import SAME_EXPERIMENT, experiment, groups_of, why_incomparable
from paceline.analysis.runs import read_run, read_runs
from paceline.core import migrations
from paceline.core.errors import RunError
from paceline.core.schema import flatten
from paceline.lab.compare.board import board
from paceline.lab.compare.compare import compare
from paceline.recipes.presets import preset
from paceline.report import page
from paceline.report.subject import load_subject
from paceline.settings.idle import why_idle
from report.runs_on_disk import write_run

Change = Callable[[dict[str, Any]], None]


def rewrite(path: Path, change: Change) -> None:
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """Three experiments; of the first also runs that do not count, and one whose config differs where it may."""
    runs: dict[str, dict[str, Any]] = {
        **{f"a-{seed}": {"seed": seed, "softcap": 15.0, "floor": 3.2 + 0.01 * seed} for seed in range(4)},
        **{f"b-{seed}": {"seed": seed, "softcap": 30.0, "floor": 3.3 + 0.02 * seed} for seed in range(3)},
        **{f"c-{seed}": {"seed": seed, "softcap": 15.0, "steps": 100, "floor": 3.1} for seed in range(2)},
        "unfinished": {"seed": 7, "softcap": 15.0, "done": 50},
        "diverged": {"seed": 8, "softcap": 15.0, "val_loss": None},
        "again": {"seed": 0, "softcap": 15.0, "floor": 9.0},
        "torn": {"seed": 9, "softcap": 15.0},
        "edited": {"seed": 5, "softcap": 15.0, "preset": "another-name"},
    }
    for name, values in runs.items():
        write_run(tmp_path / name, name=name, track="mine", **{"steps": 60, **values})
    (tmp_path / "torn" / "config.json").write_text("[]")
    rewrite(tmp_path / "edited" / "config.json", lambda config: config.update(preset="another-name"))
    rewrite(tmp_path / "edited" / "config.json", lambda config: config["train"].update(threads=2, device="cpu"))
    return [tmp_path / name for name in runs]


def test_compare_board_and_page_give_the_same_groups_and_means(folders: list[Path], tmp_path: Path) -> None:
    compared = {tuple(group.runs): group.mean for group in compare(folders).groups}
    ranked = {tuple(row.runs): row.loss for row in board([tmp_path], target=0.0).rows}  # missed: the last loss counts
    shown = {tuple(run.folder.name for run in group.runs): group.mean for group in load_subject(folders).groups}
    names = [("a-0", "a-1", "a-2", "a-3", "edited"), ("b-0", "b-1", "b-2"), ("c-0", "c-1")]
    assert compared == {runs: compared[runs] for runs in names}
    assert ranked == compared
    assert shown == compared


def test_compare_board_and_page_leave_out_the_same_runs(folders: list[Path], tmp_path: Path) -> None:
    subject = load_subject(folders)
    compared = {item.run: item.why for item in compare(folders).left_out}
    refused = {item.run: item.why for item in board([tmp_path], target=0.0).refused}
    assert compared == refused
    torn = compared.pop("torn")
    assert "torn/config.json" in torn
    assert subject.left_out == [torn]
    assert {item.run: item.why for group in subject.groups for item in group.left_out} == compared
    assert compared.keys() == {"unfinished", "diverged", "again"}


def test_the_page_prints_the_means_of_the_comparison(
    folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "_plotly_js", lambda: "")
    page.write_report(folders, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    for group in compare(folders).groups:
        assert f"<td>{group.mean:.4f}</td>" in text


def test_an_equal_run_of_an_older_version_is_in_the_same_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its softcap had another name, it had a switch that is gone, and it lacks a setting that came since."""
    monkeypatch.setitem(migrations.RENAMED, "model.logit_cap", "model.softcap")
    monkeypatch.setitem(migrations.REMOVED, "train.magic", "nothing took its place")

    def older(config: dict[str, Any]) -> None:
        config["model"]["logit_cap"] = config["model"].pop("softcap")
        config["train"]["magic"] = True
        del config["train"]["cuda_graph"]

    def older_card(card: dict[str, Any]) -> None:
        card["diff"] = [{**change, "field": change["field"].replace("softcap", "logit_cap")} for change in card["diff"]]
        card["diff"].append({"field": "train.magic", "before": False, "after": True})

    folders = write_group(tmp_path, "a", [3.2, 3.3, 3.4], softcap=30.0)
    rewrite(folders[0] / "config.json", older)
    rewrite(folders[0] / "card.json", older_card)
    (group,) = compare(folders).groups
    assert group.seeds == [0, 1, 2]
    assert group.recipe == "demo, 100 steps, model.softcap 30.0"
    monkeypatch.undo()
    assert [group.seeds for group in compare(folders).groups] == [[0], [1, 2]]


def test_a_setting_splits_groups_unless_it_is_listed(tmp_path: Path) -> None:
    """Every setting of a run, changed in the file alone."""
    base = read_run(write_card_and_config(tmp_path / "base", seed=0, loss=3.0))
    for name, _ in flatten(preset("demo")):
        config = {**base.config, name: "changed"}
        other = type(base)(label="other", folder=base.folder, card=base.card, config=config)
        alike = name in ("steps", "track") or why_idle(name, base.config)  # the first are counted as the card has them
        assert len(groups_of([base, other])) == (1 if name.startswith(SAME_EXPERIMENT) or alike else 2), name


def test_a_config_of_a_newer_version_is_read_and_is_a_group_of_its_own(tmp_path: Path) -> None:
    folders = write_group(tmp_path, "a", [3.2, 3.3])
    rewrite(folders[1] / "config.json", lambda config: config["model"].update(new_trick=True))
    runs, damaged = read_runs(folders)
    assert damaged == []
    assert [experiment(run).get("model.new_trick") for run in runs] == [None, True]
    assert len(groups_of(runs)) == 2


def test_a_run_whose_card_holds_an_infinite_number_is_left_out_by_name(tmp_path: Path) -> None:
    """No mean could take it: 1e999 is valid JSON, and is read as infinity."""
    folders = write_group(tmp_path, "a", [3.2, 3.3])
    card = folders[1] / "card.json"
    card.write_text(card.read_text().replace('"val_loss": 3.3', '"val_loss": 1e999'))
    runs, damaged = read_runs(folders)
    assert [run.label for run in runs] == ["a-0"]
    assert [item.run for item in damaged] == ["a-1"]
    assert damaged[0].why == f"{card.resolve()}: holds an infinite number; the file is damaged"


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"a": 1e400}', '{"a.b": 1, "a": 2}'])
def test_a_config_is_read_or_named(text: str, tmp_path: Path) -> None:
    folder = write_card_and_config(tmp_path / "a", seed=0, loss=3.0)
    (folder / "config.json").write_text(text)
    try:
        assert isinstance(read_run(folder).config, dict)
    except RunError as error:
        assert "a/config.json" in str(error)  # noqa: PT017 - both outcomes are right


def test_losses_on_other_validation_tokens_are_not_compared(tmp_path: Path) -> None:
    for name, tokens in (("a", 1000), ("b", 2000), ("c", 2000)):
        write_card_and_config(tmp_path / name, seed=0, loss=3.0, settings={"evaluate.tokens": tokens})
    a, b, c = (read_run(tmp_path / name) for name in "abc")
    assert why_incomparable(b, c) is None
    why = why_incomparable(a, b)
    assert why is not None
    assert "other tokens" in why
