"""`paceline evaluate`: what it prints and leaves on the card, and one line for each mistake."""

import errno
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paceline.cli import main
from paceline.commands.evaluate import ProgressLines
from paceline.metrics.card import read_card
from train.tiny import run as train
from train.tiny import tiny_config


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    threads = torch.get_num_threads()
    config = tiny_config(folder / "data")
    named = replace(config.data, tokenizer="bpe-2048")  # a name without which only the run's own file helps
    train(replace(config, data=named), folder / "run")
    torch.set_num_threads(threads)
    return folder / "run"


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.fixture
def book(tmp_path: Path) -> Path:
    path = tmp_path / "book.txt"
    path.write_text("the cat sat on the mat. " * 40)
    return path


def test_the_validation_loss_is_the_one_training_ended_with(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = read_card(run)
    assert main(["evaluate", str(run), "--json"]) == 0
    [told] = json.loads(capsys.readouterr().out)
    assert told["figures"]["loss"] == pytest.approx(before.val_loss, rel=1e-6)
    assert told["figures"]["bits_per_byte"] == pytest.approx(before.val_bpb, rel=1e-6)
    assert 0 < sum(tokens for *_, tokens, _ in told["positions"]) < told["of"]["tokens"]  # documents that are cut


def test_results_go_onto_the_card_beside_what_was_there(run: Path, book: Path) -> None:
    before = read_card(run)
    for _ in range(2):
        assert main(["evaluate", str(run), "--text", str(book), "--sequence-tokens", "512"]) == 0
    after = read_card(run)
    assert [(found.kind, found.name, found.step) for found in after.evaluations] == [
        ("validation", "data", 12),
        ("text", "book.txt", 12),
    ]
    assert (after.losses, after.val_loss, after.finished) == (before.losses, before.val_loss, True)


def test_the_table_tells_figures_and_places_inside_and_beyond_the_window(
    run: Path, book: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", str(run), "--no-validation", "--text", str(book), "--sequence-tokens", "512"]) == 0
    out = capsys.readouterr().out
    [text] = read_card(run).evaluations
    assert f"{text.figures['bits_per_byte']:.4f}" in out
    assert "960 tokens, 960 bytes" in out
    sides = [line.split()[3] for line in out.splitlines() if " to " in line]
    assert sides == ["inside"] * 5 + ["beyond", "next"]  # window of 256 tokens, sequences of 512
    assert main(["evaluate", str(run), "--no-validation", "--text", str(book), "--sequence-tokens", "128"]) == 0
    out = capsys.readouterr().out
    sides = [line.split()[3] for line in out.splitlines() if " to " in line]
    assert sides == ["inside"] * 4 + ["next"] * 3  # no sequence is longer than the window: nothing lies beyond it


def test_figures_are_told_where_the_card_cannot_be_written(
    run: Path, book: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(path: Path, _: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr("paceline.metrics.card.write_json", refuse)
    assert main(["evaluate", str(run), "--text", str(book), "--sequence-tokens", "512", "--json"]) == 0
    out, error = capsys.readouterr()
    assert [one["kind"] for one in json.loads(out)] == ["validation", "text"]
    assert error.count("\n") == 1
    assert f"{run / 'card.json'}: cannot be read or written (Read-only file system)" in error


def damaged(path: Path) -> Path:
    path.write_text('{"label": 1')
    return path


MISTAKES: dict[str, tuple[Callable[[Path], list[str]], str]] = {
    "no such run": (lambda run: [str(run / "nowhere")], "no such run"),
    "no checkpoint": (lambda run: [str(without(run, "checkpoints"))], "checkpoints: is not there, though the run"),
    "no tokenizer": (lambda run: [str(without(run, "tokenizer.json"))], "holds no tokenizer.json"),
    "no card": (lambda run: [str(without(run, "card.json"))], "card.json: does not exist"),
    "no data": (lambda run: [str(with_data_gone(run))], "not a folder"),
    "no text": (lambda run: [str(run), "--text", str(run / "gone.txt")], "gone.txt: cannot be read"),
    "a damaged file": (lambda run: [str(run), "--hellaswag", str(damaged(run / "h.jsonl"))], "line 1: not a question"),
    "too long": (lambda run: [str(run), "--sequence-tokens", "9999"], "has positions for 4,096 only"),
    "nothing to do": (lambda run: [str(run), "--no-validation"], "leaves nothing to judge"),
    "no questions": (lambda run: [str(run), "--limit", "0"], "--limit 0 must be at least 1"),
    "no task folder": (lambda run: [str(run), "--tasks", "a", "--tasks-dir", str(run / "b")], "no such folder"),
}


def without(run: Path, name: str) -> Path:
    path = run / name
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    return run


def with_data_gone(run: Path) -> Path:
    config = json.loads((run / "config.json").read_text())
    config["data"]["dir"] = str(run / "gone")
    (run / "config.json").write_text(json.dumps(config))
    return run


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line(name: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, complaint = MISTAKES[name]
    assert main(["evaluate", *arguments(run)]) == 2
    out, error = capsys.readouterr()
    assert complaint in error
    assert (error.count("\n"), out) == (1, "")


def test_progress_without_a_terminal_is_a_line_every_ten_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    clock = iter([0.0, 4.0, 20.0, 25.0])
    tell = ProgressLines("validation", lambda: next(clock))
    for done in (1, 2, 3):
        tell(done, 4)
    assert capsys.readouterr().err == "validation: 2 of 4, 20.0s left\n"
