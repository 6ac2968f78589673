"""`paceline board`: order by train time to the target, evidence, and who is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from lab.cards_on_disk import STEP_S, write_group, write_run
from paceline.analysis.statistics import mean_at_most
from paceline.cli import main
from paceline.core.errors import UserError
from paceline.lab.compare.board import TRACKS, Board, board

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
LOSSES = [3.270, 3.272, 3.271, 3.269]
SPREAD_OUT = [3.20, 3.32, 3.25, 3.31]


def reasons(found: Board) -> dict[str, str]:
    return {item.run: item.why for item in found.refused}


def test_rows_are_ordered_by_train_time_with_the_proven_ones_first(tmp_path: Path) -> None:
    write_group(tmp_path, "slow", LOSSES, track="mine", steps=200)
    write_group(tmp_path, "quick", LOSSES, track="mine", steps=100)
    write_group(tmp_path, "doubtful", SPREAD_OUT, track="mine", steps=60)
    write_run(tmp_path / "single", seed=0, loss=3.2, track="mine", steps=40)
    write_group(tmp_path, "short", [3.4, 3.5], track="mine", steps=20)
    found = board([tmp_path], target=3.28)
    assert found.track == "mine"
    assert [(row.standing, row.step) for row in found.rows] == [
        ("proven", 100), ("proven", 200), ("not proven", 40), ("not proven", 60), ("missed", 20)
    ]  # fmt: skip
    first, single = found.rows[0], found.rows[2]
    assert first.train_s == 100 * STEP_S
    assert first.p == mean_at_most(LOSSES, 3.28)
    assert (first.seeds, first.hardware, first.code) == ([0, 1, 2, 3], "2 cores of A processor", "0123456789")
    assert (single.p, single.stdev) == (None, None)


def test_a_target_passed_on_the_way_counts_when_it_was_proven_there(tmp_path: Path) -> None:
    write_group(tmp_path, "a", LOSSES, track="mine")
    (row,) = board([tmp_path], target=3.5).rows
    assert (row.step, row.train_s) == (50, 50 * STEP_S)
    (row,) = board([tmp_path], target=3.4715).rows  # reached at step 50, but not proven there: a second try
    assert row.step == 100
    assert row.p == pytest.approx(2 * mean_at_most(LOSSES, 3.4715))


def test_hardware_and_code_are_rows_of_their_own(tmp_path: Path) -> None:
    write_group(tmp_path, "a", LOSSES, track="mine")
    gpu = {"gpu": "NVIDIA H200", "cpu": "A processor"}
    write_group(tmp_path, "b", LOSSES, track="mine", device="cuda", ranks=8, environment=gpu)
    assert {row.hardware for row in board([tmp_path], target=3.28).rows} == {
        "2 cores of A processor",
        "8 x NVIDIA H200",
    }


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"data_fingerprint": "another"}, "data fingerprint is another, the track's is 6f0c2b1de1a94f77"),
        ({"finished": False, "steps_done": 3}, "not finished: 3 of 100 steps"),
        ({"val_loss": None}, "diverged"),
    ],
)
def test_a_run_with_other_data_or_without_an_end_is_refused_by_name(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    write_group(tmp_path, "good", LOSSES, track="mine")
    write_run(tmp_path / "deep" / "bad", seed=9, loss=3.0, track="mine", **change)
    found = board([tmp_path], target=3.28)
    assert [row.seeds for row in found.rows] == [[0, 1, 2, 3]]
    assert words in reasons(found)["bad"]


@pytest.mark.parametrize(
    ("room", "field", "value", "words"),
    [
        ("evaluate", "tokens", 1024, "validation tokens is 1024"),
        ("train", "untimed_steps", 90, "untimed steps is 90"),
        ("data", "one_pass", True, "one pass is True"),
        ("data", "one_pass", None, "one pass is None"),
    ],
)
def test_a_run_by_other_rules_is_refused_by_name(tmp_path: Path, room: str, field: str, value: Any, words: str) -> None:
    *_, last = write_group(tmp_path, "a", LOSSES, track="mine")
    config = json.loads((last / "config.json").read_text())
    config[room][field] = value
    (last / "config.json").write_text(json.dumps(config))
    found = board([tmp_path], target=3.28)
    assert [row.seeds for row in found.rows] == [[0, 1, 2]]
    assert words in reasons(found)[last.name]


def test_a_damaged_card_or_config_is_refused_by_name(tmp_path: Path) -> None:
    folders = write_group(tmp_path, "a", LOSSES, track="mine")
    (folders[0] / "card.json").write_text("{")
    (folders[1] / "config.json").write_text("[]")
    (folders[2] / "config.json").write_text("{}")
    found = board([tmp_path], target=3.28)
    assert [row.seeds for row in found.rows] == [[3]]
    assert sorted(reasons(found)) == ["a-0", "a-1", "a-2"]


def test_a_known_track_has_its_own_target_and_data(tmp_path: Path) -> None:
    measured = json.loads((RESULTS / "h200-track-r18-reference.json").read_text())
    track = TRACKS["en-140M"]
    assert track.rules.data_fingerprint == measured["data_fingerprint"]
    assert track.target == measured["original"]["266"]
    write_group(tmp_path, "a", LOSSES, track="en-140M")
    found = board([tmp_path])
    assert (found.target, found.rows) == (3.3128, [])
    assert all("data fingerprint" in why and "one pass is False" in why for why in reasons(found).values())


def test_the_track_and_the_target_must_be_clear(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run names a track"):
        board([tmp_path])
    write_group(tmp_path, "a", LOSSES, track="mine")
    with pytest.raises(UserError, match="no target of its own"):
        board([tmp_path])
    write_group(tmp_path, "b", LOSSES, track="yours")
    with pytest.raises(UserError, match=r"2 tracks \(mine, yours\)"):
        board([tmp_path], target=3.28)
    found = board([tmp_path], target=3.28, track="mine")
    assert [row.runs for row in found.rows] == [["a-0", "a-1", "a-2", "a-3"]]
    assert any("4 runs of other tracks" in remark for remark in found.remarks)


def test_the_command_prints_a_table_and_the_same_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_group(tmp_path, "a", LOSSES, track="mine")
    write_run(tmp_path / "[bad]", seed=9, loss=3.0, track="mine", data_fingerprint="another")
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["board", str(tmp_path), "--target", "3.28"]) == 0
    said = capsys.readouterr().out
    for words in (
        "track mine, target 3.28",
        "50.0s",
        "proven",
        "A processor",
        "[bad]",
        "data fingerprint is another",
    ):
        assert words in said
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["board", str(tmp_path), "--target", "3.28"]) == 0
    narrow = capsys.readouterr().out.splitlines()
    [row] = [line for line in narrow if "proven" in line]
    assert row.split() == ["1", "50.0s", "proven", "100", *row.split()[4:]]
    assert len(row.split()) == 8
    assert any(line.startswith("1  demo, 100 steps; ") and "A processor" in line for line in narrow)
    assert main(["board", str(tmp_path), "--target", "3.28", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["step"] for row in found["rows"]] == [100]
    assert main(["board", str(tmp_path / "nowhere")]) == 2
    assert "no such folder" in capsys.readouterr().err
