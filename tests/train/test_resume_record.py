"""What a run keeps of its resumes: settings given anew, other data, rewinds and restarts; and who counts such runs."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from paceline.checkpoint.run_folder import RunFolder
from paceline.cli import main
from paceline.data.shards import open_shard
from paceline.lab.compare.board import board
from paceline.lab.compare.compare import compare
from paceline.metrics.card import RunCard, read_card, write_card
from paceline.metrics.metrics_file import read_metrics
from paceline.report.subject import load_subject
from paceline.report.summary_text import remarks
from paceline.text.shard_writer import write_shard
from paceline.text.tokenizer import ByteTokenizer
from train.killing import assert_same, left_by, train
from train.tiny import losses

STEPS, STEP_TOKENS = 9, 512


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`whole` is finished, with checkpoints of steps 5 and 9; `cut` has those of steps 5 and 8."""
    folder = tmp_path_factory.mktemp("record")
    assert main([*train(folder, "whole", STEPS), "--track", "mine"]) == 0
    assert main([*train(folder, "cut", STEPS), "--train.stop-after", "8"]) == 0
    for name, side in (("other", "train"), ("other-val", "val")):
        other_data(folder / "data", folder / name, side)
    return folder


def other_data(data: Path, other: Path, side: str) -> None:
    """The same shards, those of one side read backwards."""
    shutil.copytree(data, other)
    for path in other.glob(f"*{side}*.bin"):
        tokens = open_shard(path).tokens[::-1].copy()
        write_shard(path, tokens, documents=40, tokenizer=ByteTokenizer().fingerprint)


@pytest.fixture
def cut(folder: Path, tmp_path: Path) -> RunFolder:
    return RunFolder(shutil.copytree(folder / "cut", tmp_path / "run"))


@pytest.fixture
def whole(folder: Path, tmp_path: Path) -> RunFolder:
    return RunFolder(shutil.copytree(folder / "whole", tmp_path / "whole"))


def resumed(run: RunFolder, *words: str) -> int:
    return main(["train", "--resume", str(run.path), "--no-finish", *words])


def settings(run: RunFolder) -> tuple[object, ...]:
    config = json.loads(run.config.read_text())
    return config["checkpoint"]["every"], config["train"]["stop_after"], config["data"]["dir"]


# ---- settings


def test_settings_given_on_a_resume_are_those_of_the_next(cut: RunFolder, folder: Path, tmp_path: Path) -> None:
    moved = str(shutil.copytree(folder / "data", tmp_path / "moved"))
    assert resumed(cut, "--data.dir", moved, "--checkpoint.every", "1", "--train.stop-after", "None") == 0
    assert settings(cut) == (1, None, moved)
    before = {change.field for change in read_card(cut.path).diff}
    assert {"checkpoint.every", "data.dir"} <= before
    assert main(["verify", str(cut.path)]) == 0
    assert resumed(cut, "--rewind", "8") == 0  # reads the same folder, and saves as often
    assert settings(cut) == (1, None, moved)
    assert [path.name for path in cut.checkpoints()] == ["step_000008", "step_000009"]


def test_a_resume_that_is_refused_keeps_no_setting(cut: RunFolder, folder: Path) -> None:
    before = cut.config.read_bytes()
    assert resumed(cut, "--checkpoint.every", "1", "--data.dir", str(folder / "other")) == 2
    assert cut.config.read_bytes() == before


def test_a_run_whose_config_and_checkpoint_differ_in_what_may_change_is_loaded_by_its_config(
    cut: RunFolder, folder: Path, tmp_path: Path
) -> None:
    from paceline.evaluate.load import read_saved

    moved = str(shutil.copytree(folder / "data", tmp_path / "moved"))
    config = json.loads(cut.config.read_text())
    config["data"]["dir"], config["checkpoint"]["every"] = moved, 3
    cut.config.write_text(json.dumps(config))
    assert read_saved(str(cut.path)).config.data.dir == moved


# ---- data


@pytest.mark.parametrize(("name", "what"), [("other", "training data"), ("other-val", "validation data")])
def test_other_data_are_refused_or_noted_with_both_fingerprints(
    name: str, what: str, cut: RunFolder, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--data.dir", str(folder / name), "--train.stop-after", "None")
    before = {path: path.read_bytes() for path in cut.path.rglob("*") if path.is_file()}
    assert resumed(cut, *words) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"paceline: --data.dir {folder / name}: other {what} from step 8 on: ")
    assert "--allow-other-data" in said
    assert said.count("\n") == 1
    assert {path: path.read_bytes() for path in cut.path.rglob("*") if path.is_file()} == before
    own = read_card(cut.path).data_fingerprint
    assert resumed(cut, *words, "--allow-other-data") == 0
    card = read_card(cut.path)
    assert card.data_fingerprint == own
    assert len(card.other_data) == 1
    assert card.all_data == f"{own}+{card.other_data[0]}"
    assert any(note.startswith(f"other {what} from step 8 on: {card.other_data[0]} instead of ") for note in card.notes)


def test_what_was_allowed_once_is_the_runs_data_from_then_on(cut: RunFolder, folder: Path) -> None:
    other = ("--data.dir", str(folder / "other"))
    assert resumed(cut, *other, "--allow-other-data", "--train.stop-after", "None", "--checkpoint.every", "1") == 0
    allowed = read_card(cut.path).all_data
    (cut.path / "card.json").unlink()
    assert resumed(cut, "--rewind", "8") == 0, "the checkpoint knows"
    assert read_card(cut.path).all_data == allowed
    assert resumed(cut, "--rewind", "8", "--data.dir", str(folder / "data")) == 2


def test_the_same_data_in_another_folder_are_the_same(cut: RunFolder, folder: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(folder / "data", tmp_path / "moved")
    assert resumed(cut, "--data.dir", str(moved), "--train.stop-after", "None") == 0
    assert read_card(cut.path).other_data == ()
    assert_same(left_by(cut.path), left_by(folder / "whole"))


def with_seeds(run: Path, card: RunCard, seeds: Sequence[int]) -> list[Path]:
    """Copies of a run under other seeds, as far as comparisons read them."""
    from dataclasses import replace

    found = []
    for seed in seeds:
        folder = run.with_name(f"{run.name}-{seed}")
        folder.mkdir()
        shutil.copy(run / "config.json", folder)
        shutil.copy(run / "metrics.jsonl", folder)
        write_card(folder, replace(card, seed=seed, name=folder.name))
        found.append(folder)
    return found


def test_a_run_with_other_data_is_another_experiment(whole: RunFolder) -> None:
    from dataclasses import replace

    card = read_card(whole.path)
    runs = with_seeds(whole.path, card, [1, 2, 3])
    runs += with_seeds(whole.path, replace(card, other_data=("f" * 32,)), [4, 5])
    found = compare(runs)
    assert [group.runs for group in found.groups] == [["whole-1", "whole-2", "whole-3"], ["whole-4", "whole-5"]]
    assert "other data (fingerprints" in found.remarks[0]
    [*_, refused] = board([whole.path.parent], target=9.0).refused
    assert refused.run == "whole-5"
    assert "data fingerprint is " in refused.why
    assert len(load_subject(runs).groups) == 2


# ---- rewinds


def test_a_rewound_run_counts_all_that_it_read_and_all_its_time(whole: RunFolder) -> None:
    before = read_card(whole.path)
    assert before.tokens == STEPS * STEP_TOKENS
    assert resumed(whole, "--rewind", "5") == 0
    card = read_card(whole.path)
    assert (card.finished, card.rewinds, card.restarts) == (True, 1, 0)
    assert card.tokens == (STEPS + 4) * STEP_TOKENS
    assert (card.train_s or 0) >= (before.train_s or 0)
    assert (card.wall_s or 0) > (before.wall_s or 0)
    steps, evaluations = read_metrics(whole.path)
    assert [record.step for record in steps] == [*range(1, STEPS + 1)]
    assert [record.tokens for record in steps[5:]] == [(n + 4) * STEP_TOKENS for n in range(6, STEPS + 1)]
    assert evaluations[-1].tokens == card.tokens
    assert resumed(whole, "--rewind", "5") == 0
    card = read_card(whole.path)
    assert (card.rewinds, card.tokens) == (2, (STEPS + 8) * STEP_TOKENS)


def test_what_was_read_after_the_newest_checkpoint_counts_too(whole: RunFolder) -> None:
    shutil.rmtree(whole.checkpoint(STEPS))
    assert resumed(whole, "--rewind", "5") == 0
    assert read_card(whole.path).tokens == (STEPS + 4) * STEP_TOKENS


def test_a_resumed_run_is_still_an_ordinary_one(cut: RunFolder) -> None:
    assert resumed(cut, "--train.stop-after", "None") == 0
    card = read_card(cut.path)
    assert (card.rewinds, card.restarts, card.tokens) == (0, 0, STEPS * STEP_TOKENS)
    assert len(losses(cut.path)) == STEPS


@pytest.mark.parametrize(
    ("words", "said"),
    [(("--rewind", "5"), "rewound once, its card counts 6,656 tokens"), (("--restart",), "restarted once, its card")],
)
def test_a_run_made_again_is_left_out_unless_asked_for(
    words: tuple[str, ...], said: str, whole: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    ordinary = with_seeds(whole.path, read_card(whole.path), [1, 2])
    assert resumed(whole, *words) == 0
    runs = [whole.path, *ordinary]
    [group] = compare(runs).groups
    assert group.seeds == [1, 2]
    capsys.readouterr()
    assert main(["compare", *map(str, runs)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert said in out
    assert "count it --with-remade" in out
    assert main(["compare", *map(str, runs), "--with-remade", "--json"]) == 0
    [counted] = json.loads(capsys.readouterr().out)["groups"]
    assert counted["seeds"] == [0, 1, 2]
    assert "rewound, restarted or extended, and counted because that was asked for: whole" in counted["remarks"]
    shown = board([whole.path.parent], target=9.0)
    assert [row.seeds for row in shown.rows] == [[1, 2]]
    assert [one.run for one in shown.refused] == ["whole"]
    assert [row.seeds for row in board([whole.path.parent], target=9.0, remade=True).rows] == [[0, 1, 2]]
    assert any(said in remark for remark in remarks(load_subject(runs)))


def test_a_rewind_that_an_older_version_only_noted_counts(whole: RunFolder) -> None:
    card = json.loads((whole.path / "card.json").read_text())
    del card["rewinds"], card["restarts"], card["other_data"]
    card["notes"].append("rewound; data go on at token 4,608, after all that was read before")
    (whole.path / "card.json").write_text(json.dumps(card))
    assert read_card(whole.path).rewinds == 1
